"""What a row of the table of mistakes is, and how it is asked about a case.

A row is an operation called with something changed. Rows of one family are told apart by which fits best; the families,
and the procedures that read something off, are asked in the order of the table, and the first that fits is the
diagnosis. Others that fit and have a name are its lookalikes. So what fits little stands before what fits much.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from tplab.align.diagnose.altered import fitted, misfit, module
from tplab.align.diagnose.case import Case, Diagnosis

COST = "cost"  # asked with an AlignReport whose numbers are all right
ERROR = "error"  # asked with the error in which a run ended


@dataclass(frozen=True, eq=False)
class Mistake:
    """One way in which an operation can be wrong."""

    name: str  # the museum's, or one in its style
    says: str  # the sentence; {op}, {name} (of the point), {module}, {value}, {text} and the like stand for `words`
    # The parameters of the operation that are others, or a function of At (and of the value, if there are values) that
    # gives them, or the tensor that comes out instead.
    change: object
    values: Mapping | Callable[[Case], Mapping] | None = None  # value → text, those that are tried; or what gives them
    fit: Callable[[Case], tuple[float, float]] | None = None  # the range of a number, fitted where no value explains it
    numbers: str = ""  # the names of the value, or of its first parts, among the evidence
    when: Callable[[Case], bool] = lambda case: True  # whether the mistake can have been made at all
    rows: Callable[[Case], torch.Tensor] | None = None  # the rows that show it, [rows] boolean; None for all
    all_ranks: bool = False  # whether it must fit the ranks that are right, too: what they hold tells such rules apart
    alike: tuple[str, ...] = ()  # names that leave the same numbers

    def candidates(self, case: Case) -> Mapping:
        """The values to be tried, with their texts."""
        if self.values is None:
            return {} if self.fit else {None: ""}
        return self.values(case) if callable(self.values) else self.values


@dataclass(frozen=True)
class Changed:
    """A mistake with one of its values, as :mod:`tplab.align.diagnose.altered` takes it."""

    mistake: Mistake
    value: object = None

    def __call__(self, at):
        change = self.mistake.change
        return change if not callable(change) else change(at) if self.value is None else change(at, self.value)


class Family:
    """Mistakes about some points, of which the one that fits best is meant. ``own``: only where the point itself was
    recorded. ``last``: asked only where nothing else fits."""

    def __init__(self, subjects: tuple[str, ...] | str, *mistakes: Mistake, own: bool = False, last: bool = False):
        self.subjects = (subjects,) if isinstance(subjects, str) else subjects
        self.mistakes, self.own, self.last = mistakes, own, last

    @property
    def names(self) -> tuple[str, ...]:
        """What it can find."""
        return tuple(name for one in self.mistakes for name in (one.name, *one.alike))

    def __call__(self, case: Case) -> Diagnosis | None:
        if self.own and case.op != case.point:
            return None
        found, able = [], []
        for one in self.mistakes:
            if one.when(case) and (about := self._seen(one, case)):
                able.append((one, about))
                ranks = [rank for rank in case.frame.ranks if case.has(case.point, rank)] if one.all_ranks else None
                for value, text in one.candidates(case).items():
                    if (gap := misfit(about, Changed(one, value), ranks)) <= case.tolerance:
                        found.append((gap, one, value, text))
        if found:
            _, one, value, text = min(found, key=lambda each: each[0])
            return said(case, one, value, text)
        for one, about in able:
            if one.fit and (value := fitted(about, partial(Changed, one), *one.fit(case))) is not None:
                return said(case, one, value, "")
        return None

    @staticmethod
    def _seen(one: Mistake, case: Case) -> Case | None:
        """The case, for a look at the rows that show the mistake; None if there are none."""
        if one.rows is None:
            return case
        rows = one.rows(case) & case.all_or(case.compared) & case.all_or(case.scope)
        return case.with_(compared=rows) if rows.any() else None


def said(case: Case, one: Mistake, value=None, text: str = "") -> Diagnosis:
    """The diagnosis of a case by a mistake."""
    inverse = value ** -2 if isinstance(value, float) else None
    sentence = one.says.format(value=value, text=text, inverse=inverse, **words(case))
    numbers = dict(zip(one.numbers.split(), value if isinstance(value, tuple) else (value,)))
    found = case.diagnosis(one.name, sentence, *one.alike, **numbers)
    return replace(found, ranks=(*numbers.values(),)) if one.numbers == "rank" else found


def words(case: Case) -> dict[str, object]:
    """What sentences may speak of."""
    config, dim = case.config, case.config.head_dim
    rope = case.rope
    return {"op": case.op, "name": case.first.name, "point": case.point, "module": module(case), "dim": dim,
            "half": case.turned // 2, "turned": case.turned, "tp": case.recording.world_size,
            "theta": rope["rope_theta"], "kind": rope["rope_type"],
            "scale": f"1 / sqrt({dim}), of a head's size" if config.scaling == dim ** -0.5 else f"{config.scaling:.4g}",
            "eps": config.rms_norm_eps, "c": config}


def procedure(*subjects: str, names: str = "", last: bool = False) -> Callable:
    """Mark a function that reads a mistake off: asked with a :class:`Case` whose point has one of these short names; or
    about ``COST`` or ``ERROR``. Where it does not fit it is None. ``names``: those that it can give."""
    def mark(function: Callable[..., Diagnosis | None]) -> Callable[..., Diagnosis | None]:
        function.subjects, function.names, function.last = subjects, tuple(names.split()), last
        return function
    return mark


def in_scope(found: Diagnosis, words: str) -> Diagnosis:
    """The same bug in some rows; one that says itself in which keeps its words."""
    return found if found.scope else replace(found, sentence=f"{found.sentence} So it is {words}.", scope=words)
