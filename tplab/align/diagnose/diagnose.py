"""``diagnose``: which bug explains the first divergence?

Every hypothesis recomputes the first divergent tensor *as if* one particular mistake had been made, from tensors that
are still right, and asks whether rounding explains what is left. Nothing else is consulted: not the patches, not the
engine's code. Where two mistakes leave the same numbers, the diagnosis names both.
"""

from dataclasses import replace

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import COST, ERROR, hypotheses
from tplab.align.report import AlignReport
from tplab.errors import TplabError

CROSSING = 3e-6  # three times the worst that one forced crossing left at any point


def diagnose(found: AlignReport | TplabError) -> Diagnosis:
    """Name the bug behind a report's first divergence, or behind the error in which a run ended.

    With several bugs in the engine it names the one that shows first; mend it and ask again.

    ``found``: what ``align`` or ``align_decode`` returned, or the error that they (or an engine, or an ``LLM``) raised.
    The :class:`Diagnosis` is ``ok`` for a healthy report; its ``fault`` is None where no hypothesis fits. A run whose
    numbers are right can still have cost too much. Raises CheckpointError if the checkpoint has changed since then.
    """
    if isinstance(found, TplabError):
        return next(_fitting(ERROR, *_error_chain(found)), Diagnosis(
            None, f"Unknown cause; the run ended with: {str(found).splitlines()[0]}", "error"))
    if found.ok:
        return next(_fitting(COST, found), Diagnosis(
            None, "Nothing is wrong: every trace point is inside the rounding floor."))
    case = Case(found)
    if (crossing := _rounding_crossing(case)) is not None:
        return crossing
    fitting = list(_fitting(case.point, case))
    if not fitting:
        return _unknown(case)
    first = fitting[0]
    others = (name for diagnosis in fitting[1:] for name in diagnosis.names if name not in first.names)
    return replace(first, lookalikes=first.lookalikes + tuple(dict.fromkeys(others))) if first.fault else first


def _fitting(subject: str, *cases):
    """What fits, hypothesis by hypothesis; each is asked about every one of ``cases``."""
    return filter(None, (hypothesis(case) for hypothesis in hypotheses(subject) for case in cases))


def _error_chain(error: TplabError) -> list[TplabError]:
    """The error and those of the lab that led to it: its cause, or what the first rank raised."""
    found = []
    while isinstance(error, TplabError) and error not in found:
        found.append(error)
        first = getattr(error, "first", None)
        error = first.exception if first is not None and first.exception is not None else error.__cause__
    return found


def _rounding_crossing(case: Case) -> Diagnosis | None:
    """In float64, is all of it no larger than one float32 rounding boundary that was crossed?"""
    points = case.report.points
    if case.report.dtype is not torch.float64 or any(point.nan or point.inf for point in points):
        return None  # a point of NaN only has a relative difference of NaN, which max() would pass over
    worst = max(point.relative for point in points)
    if worst < CROSSING:
        return case.diagnosis(
            None, f"Most likely rounding: nothing is off by more than {worst:.0e} of its scale, which is what one "
            "value leaves that falls on the other side of a float32 rounding boundary (norms and softmax cast to "
            "float32). With another prompt it is gone.", relative=worst)


def _unknown(case: Case) -> Diagnosis:
    first = case.first
    if first.nan or first.inf:
        what = f"{first.nan} NaN and {first.inf} infinite entries of {first.size}"
    elif first.spread > first.max_abs:
        what = f"off by {first.max_abs:.1e} on rank 0, and the ranks differ by up to {first.spread:.1e}"
    else:
        what = f"off by {first.relative:.1e} of its own scale"
    return case.diagnosis(None, f"Unknown cause, first seen at {first.name}: {what}. Everything before it is right.",
                          relative=first.relative, spread=first.spread, nan=first.nan)
