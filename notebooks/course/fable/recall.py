"""How well a model remembers.

The model is given the openings of held-out stories and continues them greedily. The sentences of the plot are searched
in the continuation, and each name, animal, colour, place and thing in them must be the one that the opening has
introduced. A right model is right nearly everywhere; with a broken cache or wrong positions it names wrong ones, or
writes nonsense.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from course.fable import CHECKPOINT, Story, plots, words
from course.fable.grammar import KINDS, SLOT
from tplab.errors import TplabError

# A body is at most about 150 tokens long. A longer continuation is no body of the plot.
MAX_NEW_TOKENS = 192
EOS = "<|endoftext|>"
_DETAILS = {"she": ("she", "he"), "she_cap": ("She", "He"), "sound": words.ANIMALS.values(),
            "spot": words.PLACES.values(), "used": words.THINGS.values(), "dusk": words.WEATHERS.values()}

Generate = Callable[[list[list[int]], int], Sequence[Sequence[int]]]


def right_references(story: Story, body: str) -> list[bool]:
    """Of each reference of a story, whether ``body`` makes it with the right word.

    A sentence that is garbled or missing costs all its references; the next one is searched after it, so one
    mistake does not cost the whole story.
    """
    right, at = [], 0
    for beat in plots.PLOTS[story.plot][1]:
        slots = [slot for slot in SLOT.findall(beat[0][1]) if slot in KINDS]  # those of all variants, in their order
        matches = filter(None, (_pattern(variant).search(body, at) for _, variant in beat))
        sentence = min(matches, key=re.Match.start, default=None)
        at = sentence.end() if sentence else at
        written = sentence.groups() if sentence else [None] * len(slots)
        right += [word == story.facts[slot] for slot, word in zip(slots, written, strict=True)]
    return right


@cache
def _pattern(variant: str) -> re.Pattern:
    """A sentence with any word for each reference, and in its other slots what the grammar knows."""
    parts = enumerate(SLOT.split(variant))  # literal text and names of slots, in turn
    return re.compile("".join(
        re.escape(part) if at % 2 == 0 else r"(\w+)" if part in KINDS else f"(?:{'|'.join(_DETAILS[part])})"
        for at, part in parts))


def recall(generate: Generate, stories: Sequence[Story], folder: Path = CHECKPOINT) -> dict[str, tuple[int, int]]:
    """Let a model continue the openings of ``stories``; ``{kind: (right references, references)}``, with "overall".

    ``generate(prompts, max_new_tokens)`` takes token ids, one list per opening, and returns the new ids of each,
    greedily chosen, without the prompt; whatever follows the end-of-story token is ignored. ``folder`` holds
    the tokenizer.
    """
    if not stories:
        raise TplabError("recall needs at least one story")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    outputs = generate([encoded.ids for encoded in tokenizer.encode_batch([s.opening for s in stories])],
                       MAX_NEW_TOKENS)
    if len(outputs) != len(stories):
        raise TplabError(f"generate returned {len(outputs)} outputs for {len(stories)} prompts")
    answers = []
    for story, ids in zip(stories, outputs, strict=True):
        body = tokenizer.decode([int(i) for i in ids], skip_special_tokens=False).partition(EOS)[0]
        answers += [(kind, right) for (kind, _), right in zip(story.references, right_references(story, body))]
    counts = {kind: [right for of, right in answers if kind in (of, "overall")]
              for kind in (*sorted({of for of, _ in answers}), "overall")}
    return {kind: (sum(rights), len(rights)) for kind, rights in counts.items()}
