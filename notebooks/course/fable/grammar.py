"""The story grammar: seeded stories whose later sentences must refer back to what their opening introduced.

A story is an instrument. Its opening introduces two names, an animal, a thing, two colours and two places and
says what happened; in its body every one of them returns, dozens of tokens later, where only one word is
right. So a model that continues the opening must remember them.
"""

import re
from random import Random
from typing import NamedTuple
from zlib import crc32

from course.fable import plots, words
from tplab.errors import TplabError

# Which kind of word each fact of a story is.
KINDS = {"hero": "name", "friend": "name", "pet": "animal", "pet_colour": "colour", "thing_colour": "colour",
         "home": "place", "away": "place", "thing": "thing"}

# A pair of names belongs to the held-out stories if it falls into one of this many buckets.
SPLITS = ("train", "held-out")
_HELD_OUT_BUCKETS = 8

SLOT = re.compile(r"{(\w+)}")


class Story(NamedTuple):
    """A story: ``text`` begins with ``opening``; ``references`` are the words of the rest that the opening has fixed,
    as ``(kind, word)`` in their order.

    ``facts`` maps hero, friend, pet, pet_colour, thing, thing_colour, home and away to their words.
    """

    text: str
    opening: str
    plot: str
    facts: dict[str, str]
    references: tuple[tuple[str, str], ...]

    @property
    def body(self) -> str:
        """What follows the opening."""
        return self.text[len(self.opening):]


def stories(split: str, n: int, seed: int = 0) -> list[Story]:
    """The first ``n`` stories of a split, always the same for the same ``seed``.

    ``split`` is "train" or "held-out". The two never share a pair of hero and friend, so no held-out story has
    been trained on, whatever the seeds.
    """
    if split not in SPLITS:
        raise TplabError(f"no split {split!r} of the fables; there are {' and '.join(map(repr, SPLITS))}")
    if n < 0:
        raise TplabError(f"cannot write {n} stories; n must be 0 or more")
    return [_story(split, Random(f"{split}/{seed}/{i}")) for i in range(n)]


def _pick(rng, pool):
    # Only random() is promised to give the same numbers in every version of Python.
    return list(pool)[int(rng.random() * len(pool))]


def _variant(rng, beat):
    ticket = rng.random() * sum(weight for weight, _ in beat)
    for weight, text in beat:
        ticket -= weight
        if ticket < 0:
            return text
    return beat[-1][1]


def _two(rng, pool):
    first = _pick(rng, pool)
    return first, _pick(rng, [w for w in pool if w != first])


def _facts(split, rng):
    while True:
        hero, friend = _two(rng, words.GIRLS + words.BOYS)
        held_out = crc32(f"{hero}+{friend}".encode()) % _HELD_OUT_BUCKETS == 0
        if held_out == (split == "held-out"):
            break
    pet_colour, thing_colour = _two(rng, words.COLOURS)
    home, away = _two(rng, words.PLACES)
    pet, thing = _pick(rng, words.ANIMALS), _pick(rng, words.THINGS)
    return {"hero": hero, "friend": friend, "pet": pet, "pet_colour": pet_colour, "thing": thing,
            "thing_colour": thing_colour, "home": home, "away": away}


def _story(split, rng):
    facts = _facts(split, rng)
    weather = _pick(rng, words.WEATHERS)
    she = "she" if facts["hero"] in words.GIRLS else "he"
    fill = facts | {
        "weather": weather, "girl": "girl" if she == "she" else "boy", "she": she, "she_cap": she.capitalize(),
        "sound": words.ANIMALS[facts["pet"]], "spot": words.PLACES[facts["home"]],
        "used": words.THINGS[facts["thing"]], "dusk": words.WEATHERS[weather]}
    plot = _pick(rng, plots.PLOTS)
    event, beats = plots.PLOTS[plot]
    opening = " ".join([_variant(rng, beat) for beat in plots.OPENING] + [event]).format(**fill)
    variants = [_variant(rng, beat) for beat in beats]
    text = " ".join([opening, *(variant.format(**fill) for variant in variants)])
    references = tuple((KINDS[slot], fill[slot]) for variant in variants for slot in SLOT.findall(variant)
                       if slot in KINDS)
    return Story(text, opening, plot, facts, references)
