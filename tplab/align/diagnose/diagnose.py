"""``diagnose``: which bug explains the first divergence?

Every row of the table recomputes a guilty point's tensor *as if* one particular mistake had been made, from what the
engine itself had before it, and asks whether rounding explains what is left. Nothing else is consulted: not the
patches, not the engine's code. Where two mistakes leave the same numbers, the diagnosis names both.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch

from tplab.align.diagnose.altered import compound, sources
from tplab.align.diagnose.case import Case, Diagnosis, Scope
from tplab.align.diagnose.mistakes import TABLE
from tplab.align.diagnose.table import COST, ERROR, in_scope
from tplab.align.diagnose.traits import traits
from tplab.align.guilty import Judge, unseen_before
from tplab.align.points import layout
from tplab.align.report import AlignReport
from tplab.errors import TplabError


@torch.inference_mode()
def diagnose(found: AlignReport | TplabError) -> Diagnosis:
    """Name the bug behind a report's first divergence, or behind the error in which a run ended.

    With several bugs in the engine it names the one that shows first; :func:`diagnose_all` names all.

    ``found``: what ``align``, ``align_decode`` or ``check`` returned, or the error that they (or an engine, or an
    ``LLM``) raised. The :class:`Diagnosis` is ``ok`` for a healthy report; its ``fault`` is None where nothing
    fits. A run whose numbers are right can still have cost too much. Raises CheckpointError if the checkpoint has
    changed since then.
    """
    if isinstance(found, TplabError):
        return next(_fitting(ERROR, *_error_chain(found)), Diagnosis(
            None, f"Unknown cause; the run ended with: {str(found).splitlines()[0]}", "error"))
    if wrong := _contradictions(found):
        return wrong[0]
    if found.ok:
        return next(_fitting(COST, found), Diagnosis(
            None, "Nothing is wrong: every trace point is inside the rounding floor."))
    if found.guilty:
        case = Case(found)
        return (_explained(case) or [_unknown(case)])[0]
    return next(_fitting(COST, found), None) or _rounding(found)


# With these, rows of a rank are not those that they are taken for, and nothing else can be said about the run.
MISPLACED = ("row_order",)


@torch.inference_mode()
def diagnose_all(report: AlignReport) -> list[Diagnosis]:
    """One diagnosis for each bug in an engine, in the order in which they show; empty if nothing is wrong.

    Every point that is wrong given its own inputs is a case of its own; what has the same name, or at the same point of
    each layer none, is one bug. Without a name of its own, a point that may have its error from where nothing was
    recorded is none.
    """
    found = _contradictions(report)
    if not report.guilty:
        return found or ([] if (one := diagnose(report)).ok else [one])
    judge, explained = Judge(report.recording, report.checkpoint, report.plan), defaultdict(list)
    for name in report.guilty:
        case = Case(report, name, judge)
        here = _explained(case, explained[_short(name)])
        if not here and (report.local[name].perhaps_from or found and name == "embed"):
            continue  # with ranks that were given other ids, the embedding cannot be right
        for one in here or [_unknown(case)]:
            if one.fault in MISPLACED:
                return [replace(one, points=tuple(report.guilty))]
            _add(found, one, name)
    return _causes(found, report.recording.contradictions)


def _add(found: list[Diagnosis], one: Diagnosis, name: str) -> None:
    """A diagnosis of the point ``name`` beside those found before: with the same bug's, if it is among them."""
    for i, known in enumerate(found):
        both = tuple(fault for fault in known.names if fault in one.names)
        alike = both or known.names == one.names and _short(known.point) == _short(name)
        if alike and (known.scope == one.scope or both and "" in (known.scope, one.scope)):
            better = known if known.fault in both or not both else one
            lookalikes = tuple(fault for fault in both if fault != better.fault)
            found[i] = replace(better, lookalikes=lookalikes, points=(*known.points, name),
                               scope=known.scope or one.scope)
            return
    found.append(replace(one, points=(name,)))


def _explained(case: Case, explained: list | None = None) -> list[Diagnosis]:
    """What explains a case: one bug in all rows or in some, or two in rows that do not overlap."""
    if (one := _explain(case, explained)) is not None and one.fault:
        return [one]
    guilty, scopes = case.guilty_rows, list(case.scopes())
    whole = [scope for scope in scopes if (guilty <= scope.rows).all()]
    # The keys that one kind of call made are seen in the other's rows, too.
    seen = scopes[:2] if len(case.way) > 1 else []
    in_one = (_explained_in(case, scope) for scope in (*whole, *seen))
    if found := next(filter(None, in_one), None):
        return [found]
    apart = [_explained_in(case, scope, compared=scope.rows) for scope in scopes[:2]
             if (guilty & scope.rows).any() and not (guilty <= scope.rows).all()]
    return [*filter(None, apart)] or _on_one_rank(case) or ([one] if one else [])


def _explained_in(case: Case, scope: Scope, **changed) -> Diagnosis | None:
    """A bug with a name that explains a case if it stands in some rows only; it says so if its words do not yet."""
    found = _explain(case.with_(scope=scope.rows, **changed))
    return in_scope(found, scope.words) if found and found.fault else None


def _on_one_rank(case: Case) -> list[Diagnosis]:
    """What explains a sum over the ranks if one of them does it; all of them show it."""
    for rank in case.frame.ranks if layout(case.point) == "replicated" and case.recording.world_size > 1 else ():
        if (found := _explain(case.with_(on=(rank,)))) and found.fault:
            return [replace(found, sentence=f"{found.sentence} So it is on rank {rank} only.", ranks=(rank,))]
    return []


def _contradictions(report: AlignReport) -> list[Diagnosis]:
    """What is wrong with a recorded engine whatever its numbers are."""
    if report.recording is None:
        return []
    return [Diagnosis(what.fault, f"{what[:1].upper()}{what[1:]}.", "layout")
            for what in report.recording.contradictions]


def _causes(found: list[Diagnosis], contradictions: list) -> list[Diagnosis]:
    """The diagnoses without those of contradictions that a named bug explains."""
    named = {_short(point) for one in found if one.fault for point in one.points}
    behind = [f"{what[:1].upper()}{what[1:]}." for what in contradictions if named & {*what.about}]
    return [one for one in found if one.fault or one.sentence not in behind]


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _explain(case: Case, explained: list | None = None) -> Diagnosis | None:
    """What explains a case. ``explained``: what did so at this point of earlier layers. It is asked first, and if one
    fits again no other is: a bug stands in every layer. What fits is added."""
    about = [case.with_(ops=ops) for ops in compound(case) if not case.on or ops != (case.point,)]
    fitting = [(asked, found) for asked in explained or () for one in about
               if one.op in asked.subjects and (found := asked(one))]
    for last in (False, True):
        fitting = fitting or [(asked, found) for one in about for asked in asked_about(one.op, last)
                              if (found := asked(one))]
    if not fitting:
        return None
    if explained is not None:
        explained += [asked for asked, _ in fitting if asked not in explained]
    first, *more = [found for _, found in fitting]
    others = (name for diagnosis in more for name in diagnosis.names if name not in first.names)
    return replace(first, lookalikes=first.lookalikes + tuple(dict.fromkeys(others))) if first.fault else first


def asked_about(subject: str, last: bool = False) -> Iterator:
    """The entries of the table about a subject, in its order; those that are asked ``last`` apart."""
    return (one for one in TABLE if subject in one.subjects and one.last == last)


def _fitting(subject: str, *cases):
    """What fits, one after the other; each is asked about every one of ``cases``."""
    return filter(None, (asked(case) for asked in asked_about(subject) for case in cases))


def _error_chain(error: TplabError) -> list[TplabError]:
    """The error and those of the lab that led to it: its cause, or what the first rank raised."""
    found = []
    while isinstance(error, TplabError) and error not in found:
        found.append(error)
        first = getattr(error, "first", None)
        error = first.exception if first is not None and first.exception is not None else error.__cause__
    return found


def _rounding(report: AlignReport) -> Diagnosis:
    """No module is wrong given its own inputs, and yet something is outside the floor."""
    point, worst = report.first_divergence, max(diff.relative for diff in report.local.values())
    boundary = (" That is what one value leaves that falls on the other side of a float32 rounding boundary (norms and "
                "softmax cast to float32); with another prompt it is gone.") * (report.dtype is torch.float64)
    return Diagnosis(None, f"Most likely rounding: {point.name} is off by {point.relative:.0e} of its scale, but no "
                     f"module by more than {worst:.0e} of what it should make of its own inputs.{boundary}",
                     point.name, {"relative": point.relative})


def _unknown(case: Case) -> Diagnosis:
    first, local = case.first, case.report.local[case.first.name]
    if first.nan or first.inf:
        what = f"{first.nan} NaN and {first.inf} infinite entries of {first.size}"
    elif first.spread > first.max_abs:
        what = f"off by {first.max_abs:.1e} on rank 0, and the ranks differ by up to {first.spread:.1e}"
    elif first == case.report.first_divergence:
        what = f"off by {first.relative:.1e} of its largest value"
    else:
        return case.diagnosis(None, f"Unknown cause at {first.name}: given its own inputs it is off by "
                              f"{local.relative:.1e} of its row's largest value.{_surroundings(case)}",
                              relative=local.relative)
    seen = next(iter(case.report.local)) != first.name
    recorded = "recorded " * bool(unseen_before(first.name, case.recording, case.checkpoint))
    before = f"Everything {recorded}before it is right." if seen or not recorded else "Nothing before it was recorded."
    return case.diagnosis(None, f"Unknown cause, first seen at {first.name}: {what}. {before}{_surroundings(case)}",
                          relative=first.relative, spread=first.spread, nan=first.nan)


def _surroundings(case: Case) -> str:
    """What an unknown bug is made from and looks like, and what it is not."""
    asked = dict.fromkeys(name for last in (False, True) for op in case.way for one in asked_about(op, last)
                          for name in one.names)
    through = f", through {', '.join(case.way[:0:-1])}, which were not recorded" * (len(case.way) > 1)
    given = [name + " (not recorded)" * (not any(case.recording.points.get(name, ()))) for name in sources(case)]
    looks = "".join(f" {trait[0].upper()}{trait[1:]}." for trait in traits(case))
    return (f" It is computed from {' and '.join(given) or 'the token ids'}{through}.{looks} "
            f"Looked for and not found: {', '.join(asked)}.")
