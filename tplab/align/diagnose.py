"""``diagnose``: which bug explains the first divergence?

The museum and its probes are the table. Every bug that can show is put into the lab's own engine, which replays the
guilty layer on what the run itself had before it: a bug is named where the engine with it makes what the run made.
Nothing else is consulted: not the patches, not the engine's code. Where two bugs leave the same numbers, the diagnosis
names both.
"""

from dataclasses import replace

import torch

from tplab.align import errors, facts
from tplab.align.diagnosis import Diagnosis, one_digit, sentence_of
from tplab.align.fit import GuiltyPoint
from tplab.align.points import SUMS, short_name
from tplab.align.report import AlignReport
from tplab.errors import TplabError

ADDED_UP = {*SUMS["o"], *SUMS["down"]}  # over the ranks: one that lacks a share fits several bugs
MISPLACED = ("row_order",)  # with these, rows of a rank are not those that they are taken for


@torch.inference_mode()
def diagnose(result: AlignReport | TplabError) -> Diagnosis:
    """Name the bug behind a report's first divergence, or behind the error in which a run ended.

    ``result``: what ``align``, ``align_decode`` or ``check`` returned, or the error that they (or an engine, or an
    ``LLM``) raised. The :class:`Diagnosis` is ``ok`` for a healthy report; its ``fault`` is None where nothing fits.
    """
    if isinstance(result, TplabError):
        chain = _error_chain(result)
        known = filter(None, (procedure(error) for procedure in errors.ERRORS for error in chain))
        return next(known, Diagnosis(
            None, f"No known bug fits. The run ended with: {str(chain[-1]).splitlines()[0]}", "error"))
    if result.diagnoses:
        return result.diagnoses[0]
    return next(facts.costs(result), Diagnosis(
        None, "Nothing is wrong: every trace point is inside the rounding floor.") if result.ok else _rounding(result))


@torch.inference_mode()
def diagnose_all(report: AlignReport) -> list[Diagnosis]:
    """One diagnosis for each bug in an engine, in the order in which they show; empty if nothing is wrong."""
    contradictions = report.recording.contradictions if report.recording else ()
    diagnoses = [Diagnosis(what.fault, f"{what[:1].upper()}{what[1:]}.", "layout") for what in contradictions]
    by_layout = {short for what in contradictions for short in what.about}  # wrong, because a share is
    if not report.guilty:
        return diagnoses or list(facts.costs(report))[:1] or ([] if report.ok else [_rounding(report)])
    explained: list = []
    by_point = {}
    for name in (name for name in report.guilty if short_name(name) not in by_layout & ADDED_UP):
        by_point[name] = _by_facts(report, name) or GuiltyPoint(report, name).diagnoses(explained)
        if by_point[name][0].fault in MISPLACED:
            return [replace(by_point[name][0], points=tuple(report.guilty))]
    for name, named in by_point.items():
        if explained and not _any_name(named):  # what was found later may explain it, too
            named = GuiltyPoint(report, name).diagnoses(explained, known_only=True)
        if not _any_name(named) and (report.local[name].perhaps_from or short_name(name) in by_layout):
            continue  # it may have its error from where nothing was recorded, or from a wrong share
        for diagnosis in named:
            _add(diagnoses, diagnosis, name)
    return diagnoses


def _any_name(diagnoses: list[Diagnosis]) -> bool:
    return any(diagnosis.fault for diagnosis in diagnoses)


def _by_facts(report: AlignReport, name: str) -> list[Diagnosis]:
    """What the steps and block tables of the lab's own engine tell about a guilty point."""
    if report.decode is None:
        return []
    if name == "embed":
        embedded = facts.Embedded(report)
        named = facts.rows_in_other_orders(embedded) or facts.rejected_draft_kept(embedded)
    else:
        named = facts.strange_blocks(report, name) if name.endswith(".attn") else None
    return [named] if named else []


def _add(diagnoses: list[Diagnosis], diagnosis: Diagnosis, name: str) -> None:
    """A diagnosis of the point ``name`` beside those found before: with the same bug's, if it is among them."""
    for i, known in enumerate(diagnoses):
        both = tuple(fault for fault in known.names if fault in diagnosis.names)
        alike = both or known.names == diagnosis.names and short_name(known.point) == short_name(name)
        if alike and (known.scope == diagnosis.scope or not both or "" in (known.scope, diagnosis.scope)):
            better = known if known.fault in both or not both else diagnosis
            ranks = tuple(sorted({*known.ranks, *diagnosis.ranks})) if known.ranks and diagnosis.ranks else ()
            diagnoses[i] = replace(better, lookalikes=tuple(f for f in both if f != better.fault),
                                   points=(*known.points, name), scope=known.scope or diagnosis.scope, ranks=ranks)
            return
    diagnoses.append(replace(diagnosis, points=(name,)))


def _error_chain(error: TplabError) -> list[TplabError]:
    """The error and those of the lab that led to it: its cause, or what the first rank raised."""
    chain = []
    while isinstance(error, TplabError) and error not in chain:
        chain.append(error)
        first = getattr(error, "first", None)
        error = first.exception if first is not None and first.exception is not None else error.__cause__
    return chain


def _rounding(report: AlignReport) -> Diagnosis:
    point, worst = report.first_divergence, max(diff.relative for diff in report.local.values())
    evidence = (f"the difference is {one_digit(point.relative)} of the scale, and no module is off by more than "
                f"{one_digit(worst)} of what its own inputs give")
    return Diagnosis(None, sentence_of("most likely rounding", evidence, point.name), point.name,
                     {"relative": point.relative})
