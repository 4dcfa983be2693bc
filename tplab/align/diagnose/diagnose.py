"""``diagnose``: which bug explains the first divergence?

Every hypothesis recomputes the first divergent tensor *as if* one particular mistake had been made, from tensors that
are still right, and asks whether rounding explains what is left. Nothing else is consulted: not the patches, not the
engine's code. Where two mistakes leave the same numbers, the diagnosis names both.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from tplab.align.diagnose import attention, cache, costs, ends, errors, rope, sums, weights
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.report import AlignReport
from tplab.errors import TplabError

CROSSING = 3e-6  # three times the worst that one forced crossing left at any point

Hypothesis = Callable[[Case], Diagnosis | None]

# By the first divergent point: which hypotheses are asked, in this order.
HYPOTHESES: dict[str, list[Hypothesis]] = {}
for _room in (weights, rope, attention, cache, sums, ends):
    for _point, _hypotheses in _room.HYPOTHESES.items():
        HYPOTHESES.setdefault(_point, []).extend(_hypotheses)


def diagnose(found: AlignReport | TplabError) -> Diagnosis:
    """Name the bug behind a report's first divergence, or behind the error in which a run ended.

    With several bugs in the engine it names the one that shows first; mend it and ask again.

    Args:
        found: what ``align`` or ``align_decode`` returned, or the error that they (or an engine, or an ``LLM``) raised.

    Returns:
        A :class:`Diagnosis`: ``ok`` for a healthy report; ``fault`` None with the first divergent point where no
        hypothesis fits. A run whose numbers are right can still have cost too much.

    Raises:
        CheckpointError: the checkpoint has changed since the report was made.
    """
    if isinstance(found, TplabError):
        causes = errors.chain(found)
        known = filter(None, (hypothesis(error) for hypothesis in errors.HYPOTHESES for error in causes))
        return next(known, Diagnosis(None, f"Unknown cause; the run ended with: {str(found).splitlines()[0]}", "error"))
    if found.ok:
        known = filter(None, (hypothesis(found) for hypothesis in costs.HYPOTHESES))
        return next(known, Diagnosis(None, "Nothing is wrong: every trace point is inside the rounding floor."))
    case = Case(found)
    if (crossing := _rounding_crossing(case)) is not None:
        return crossing
    fitting = [diagnosis for hypothesis in HYPOTHESES.get(case.at, ()) if (diagnosis := hypothesis(case)) is not None]
    if not fitting:
        return _unknown(case)
    first = fitting[0]
    others = (name for diagnosis in fitting[1:] for name in diagnosis.names if name not in first.names)
    return replace(first, lookalikes=first.lookalikes + tuple(dict.fromkeys(others))) if first.fault else first


def _rounding_crossing(case: Case) -> Diagnosis | None:
    """In float64, is all of it no larger than one float32 rounding boundary that was crossed?"""
    points = case.report.points
    if case.report.dtype is not torch.float64 or any(point.nan or point.inf for point in points):
        return None  # a point of NaN only has a relative difference of NaN, which max() would pass over
    worst = max(point.relative for point in points)
    if worst >= CROSSING:
        return None
    return case.found(None,
                      f"Most likely rounding: nothing is off by more than {worst:.0e} of its scale, which is what "
                      "one value leaves that falls on the other side of a float32 rounding boundary (norms and softmax "
                      "cast to float32). With another prompt it is gone.", relative=worst)


def _unknown(case: Case) -> Diagnosis:
    point = case.first
    if point.nan or point.inf:
        what = f"{point.nan} NaN and {point.inf} infinite entries of {point.size}"
    elif point.spread > point.max_abs:
        what = f"off by {point.max_abs:.1e} on rank 0, and the ranks differ by up to {point.spread:.1e}"
    else:
        what = f"off by {point.relative:.1e} of its own scale"
    return case.found(None, f"Unknown cause, first seen at {point.name}: {what}. Everything before it is right.",
                      relative=point.relative, spread=point.spread, nan=point.nan)
