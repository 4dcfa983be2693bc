"""Reading a continuation with the grammar: is it a body of the story's plot, and does every reference hold?"""

import re
from dataclasses import dataclass
from functools import cache

from course.fable import plots, words
from course.fable.grammar import KINDS, SLOT, Story

_WORDS = {"name": words.GIRLS + words.BOYS, "animal": words.ANIMALS, "colour": words.COLOURS,
          "place": words.PLACES, "thing": words.THINGS}
_DETAILS = {"she": ("she", "he"), "she_cap": ("She", "He"), "sound": words.ANIMALS.values(),
            "spot": words.PLACES.values(), "used": words.THINGS.values(), "dusk": words.WEATHERS.values()}


@dataclass(frozen=True)
class Answer:
    """What a continuation says where the story refers back; ``said`` is None where the sentence never comes."""

    kind: str
    expected: str
    said: str | None

    @property
    def right(self) -> bool:
        return self.said == self.expected


@dataclass(frozen=True)
class Reading:
    """A continuation of ``story`` as the grammar reads it.

    ``grammatical``: the text is one sentence of each beat of the plot, in order, and nothing else, with a word
    of the right kind in every slot (not necessarily the right word). ``answers``: one for each reference that a
    body of this plot makes, in order.
    """

    story: Story
    text: str
    grammatical: bool
    answers: tuple


def read(story: Story, text: str) -> Reading:
    """Read ``text`` as the body of ``story`` (what follows its opening).

    A sentence that is garbled or missing costs all its references; the next one is searched after it, so one
    mistake does not cost the whole story.
    """
    grammatical, answers, at = True, [], 0
    for beat in plots.PLOTS[story.plot][1]:
        found = min(filter(None, (p.search(text, at) for p, _ in _patterns(beat))), key=re.Match.start, default=None)
        slots = _patterns(beat)[0][1]  # those of all variants, in their order
        if found is None:
            said = [None] * len(slots)
            grammatical = False
        else:
            said = found.groups()
            in_place = text[at : found.start()] == " "
            known = all(word in _WORDS[KINDS[slot]] for slot, word in zip(slots, said, strict=True))
            grammatical = grammatical and in_place and known
            at = found.end()
        answers += [Answer(KINDS[s], story.facts[s], w) for s, w in zip(slots, said, strict=True)]
    return Reading(story, text, grammatical and at == len(text), tuple(answers))


@cache
def _patterns(beat):
    """For each variant of a beat: its pattern, with one group per reference, and the slots of these groups."""
    result = []
    for _, variant in beat:
        pattern, slots, at = "", [], 0
        for slot in SLOT.finditer(variant):
            pattern += re.escape(variant[at : slot.start()])
            if slot[1] in KINDS:
                pattern += r"(\w+)"
                slots.append(slot[1])
            else:
                pattern += "(?:" + "|".join(map(re.escape, _DETAILS[slot[1]])) + ")"
            at = slot.end()
        result.append((re.compile(pattern + re.escape(variant[at:])), tuple(slots)))
    return result
