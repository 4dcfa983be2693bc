"""Speculative decoding (arXiv:2211.17192) with drafts from the text itself (prompt lookup, vLLM's ``ngram``).

A step computes a sequence's newest token and a draft of the next ones. Drafted tokens are kept as far as they are what
the model itself chooses; its own choice follows them. So a greedy text stays the same, as long as the model chooses
alike whether it computes one token or several: rounding can differ there, and ``batch_invariant=True`` makes it equal.
"""

from collections.abc import Sequence

LONGEST = 3  # tokens at the end of a text that are looked for (vLLM: prompt_lookup_max)


def propose(token_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """At most ``count`` tokens that may come next: what followed when the last tokens stood there before.

    The longest ending that is found decides, and of its places the last.
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

    ``chosen`` are the model's choices in the draft's places, and one behind its end.
    """
    for place, (drafted, own) in enumerate(zip(draft, chosen)):
        if drafted != own:
            return place
    return len(draft)
