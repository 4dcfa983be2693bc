"""Speculative decoding (arXiv:2211.17192) with drafts from the text itself (prompt lookup, vLLM's ``ngram``).

A step computes a sequence's newest token and a draft of the next ones. Drafted tokens are
kept up to the first that the model would not have chosen; then comes the model's own choice. So a greedy text stays the
same, if the model chooses the same token whether it computes one token or several at once. Rounding can differ between
the two; with ``batch_invariant=True`` it does not.
"""

from collections.abc import Sequence

LONGEST = 3  # tokens at the end of a text that are looked for (vLLM: prompt_lookup_max)


def propose(token_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """At most ``count`` tokens that may come next: those that followed the text's last tokens where these stood before.

    The longest ending that occurs before is used; of several occurrences, the last one.
    """
    tokens = list(token_ids)
    for length in range(min(LONGEST, len(tokens) - 1) if count else 0, 0, -1):
        ending = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start:start + length] == ending:
                return tuple(tokens[start + length:start + length + count])
    return ()


def num_accepted(draft: Sequence[int], chosen: Sequence[int | None]) -> int:
    """How many drafted tokens stay: those before the first that the model would not have chosen.

    ``chosen`` are the model's choices at the draft's positions, and one more after the last.
    """
    for place, (drafted, choice) in enumerate(zip(draft, chosen)):
        if drafted != choice:
            return place
    return len(draft)
