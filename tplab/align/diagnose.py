"""``diagnose``: which bug explains the first divergence?

The museum is the table. Every fault that can show is put into the lab's own engine, which replays the guilty layer on
what the run itself had before it: a fault is named where the engine with it makes what the run made. Then the probes
are asked in the same way. Nothing else is consulted: not the patches, not the engine's code. Where two bugs leave the
same numbers, the diagnosis names both.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tplab.align import errors, facts
from tplab.align.diagnosis import Diagnosis
from tplab.align.floors import SHORT
from tplab.align.guilty import Judge, by_row, unseen_before
from tplab.align.points import inputs, layer_of, made_by
from tplab.align.probes import Probe, probes
from tplab.align.report import AlignReport
from tplab.errors import TplabError
from tplab.model.rope import Rotary, rotate

NO_NUMBERS = ("load", "steps", "blocks", "drawn", "error")  # first points of faults that no tensor shows
MISPLACED = ("row_order",)  # with these, rows of a rank are not those that they are taken for
IN_DECODE, IN_PROMPTS = "in decode calls only", "in calls of several tokens only"


@torch.inference_mode()
def diagnose(found: AlignReport | TplabError) -> Diagnosis:
    """Name the bug behind a report's first divergence, or behind the error in which a run ended.

    ``found``: what ``align``, ``align_decode`` or ``check`` returned, or the error that they (or an engine, or an
    ``LLM``) raised. The :class:`Diagnosis` is ``ok`` for a healthy report; its ``fault`` is None where nothing fits.
    """
    if isinstance(found, TplabError):
        return next(_told(errors.ERRORS, *_error_chain(found)), Diagnosis(
            None, f"Unknown cause; the run ended with: {str(found).splitlines()[0]}", "error"))
    every = diagnose_all(found, first=True)
    if every:
        return every[0]
    return next(_told(facts.COSTS, found), Diagnosis(
        None, "Nothing is wrong: every trace point is inside the rounding floor.") if found.ok else _rounding(found))


@torch.inference_mode()
def diagnose_all(report: AlignReport, first: bool = False) -> list[Diagnosis]:
    """One diagnosis for each bug in an engine, in the order in which they show; empty if nothing is wrong. ``first``:
    the first one alone."""
    found = [Diagnosis(what.fault, f"{what[:1].upper()}{what[1:]}.", "layout") for what in (
        report.recording.contradictions if report.recording else ())]
    if not report.guilty:
        return found or (list(_told(facts.COSTS, report))[:1] if report.ok or first else [diagnose(report)])
    judge, explained = report.judge, []
    for name in report.guilty:
        here = Guilty(report, name, judge).named(explained)
        if not here and report.local[name].perhaps_from:
            continue  # it may have its error from where nothing was recorded
        for one in here or [_unknown(report, name)]:
            if one.fault in MISPLACED:
                return [replace(one, points=tuple(report.guilty))]
            _add(found, one, name)
        if first and found:
            break
    return found


def _add(found: list[Diagnosis], one: Diagnosis, name: str) -> None:
    """A diagnosis of the point ``name`` beside those found before: with the same bug's, if it is among them."""
    for i, known in enumerate(found):
        both = tuple(fault for fault in known.names if fault in one.names)
        alike = both or known.names == one.names and _short(known.point) == _short(name)
        if alike and (known.scope == one.scope or both and "" in (known.scope, one.scope)):
            better = known if known.fault in both or not both else one
            found[i] = replace(better, lookalikes=tuple(f for f in both if f != better.fault),
                               points=(*known.points, name), scope=known.scope or one.scope)
            return
    found.append(replace(one, points=(name,)))


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _told(procedures: Iterable, *about) -> Iterator[Diagnosis]:
    return filter(None, (asked(one) for asked in procedures for one in about))


def _error_chain(error: TplabError) -> list[TplabError]:
    """The error and those of the lab that led to it: its cause, or what the first rank raised."""
    found = []
    while isinstance(error, TplabError) and error not in found:
        found.append(error)
        first = getattr(error, "first", None)
        error = first.exception if first is not None and first.exception is not None else error.__cause__
    return found


def table(config, ranks: int) -> Iterator:
    """Every bug that can show on a model: the museum's, then the probes; each has a name, a title and patches."""
    from tplab.faults.museum import MUSEUM  # its room is above this one

    yield from (one for one in MUSEUM.values() if one.first_point not in NO_NUMBERS and one.applies_to(config, ranks))
    yield from probes(config)


@dataclass(frozen=True)
class Fit:
    """How a bug explains a guilty point."""

    bug: object
    gap: float  # what it leaves of the difference
    spared: int  # rows in which it would show, and the run is right
    scope: str  # where it stands, in words
    alike: bool  # whether the collectives are the run's, too


class Guilty:
    """One guilty point of a run: what each rank holds there, and what it should hold."""

    def __init__(self, report: AlignReport, name: str, judge: Judge):
        self.report, self.name, self.judge, self.ranks = report, name, judge, report.local[name].guilty
        self.held = {of: x for of in judge.ranks if report.recording.points[name][of] is not None
                     and (x := judge.held(name, of)) is not None}
        self.right = {of: judge.expected(name, of) for of in self.held}
        limit = {of: judge.tolerance(name, of) for of in self.held}
        off = {of: by_row(x, self.right[of]) for of, x in self.held.items()}
        self.wrong = {of: ~(off[of] <= limit[of]) for of in self.held}  # [rows] boolean
        most = max(off[of][self.wrong[of]].max().item() for of in self.ranks)
        self.tolerance = min((2 if report.dtype in SHORT else 3) * max(limit.values()), most / 4)
        self.limit = max(limit.values())
        places = report.recording.logit_places if name == "logits" else report.recording.places
        self.places = places
        keys = dict(zip(report.recording.places, report.recording.num_keys))
        several = {(s, keys[s, p]) for s, p in places if (s, p - 1) in keys and keys[s, p - 1] == keys[s, p]}
        self.decoded = torch.tensor([p > 0 and keys[s, p] == p + 1 and (s, keys[s, p]) not in several
                                     for s, p in places])

    def named(self, explained: list) -> list[Diagnosis]:
        """The bug that explains the point in all wrong rows, or one for decode calls and one for prompts. ``explained``:
        the bugs that explained other points, asked first; new ones are added."""
        if said := self._by_facts():
            return [said]
        rows = [self.decoded, ~self.decoded]
        for about in ([None], rows if any(w.any() for w in rows) else []):
            found = [one for some in about if (one := self._explained(explained, some))]
            if found:
                return found
        return []

    def _by_facts(self) -> Diagnosis | None:
        if self.report.decode is None:
            return None
        if self.name == "embed":
            return next(_told((facts.rows_in_other_orders, facts.rejected_draft_kept), facts.Embedded(self.report)), None)
        return facts.strange_blocks(self.report, self.name) if _short(self.name) == "attn" else None

    def _explained(self, explained: list, rows: torch.Tensor | None) -> Diagnosis | None:
        wrong = {of: w if rows is None else w & rows for of, w in self.wrong.items()}
        if not any(w.any() for w in wrong.values()):
            return None
        # First what explained other points; then the museum's faults that first show here; then all others, unless
        # none of them explained the same point of an earlier layer.
        here = {_short(self.name), *map(_short, unseen_before(self.name, self.report.recording, self.report.checkpoint))}
        nearest, museum, beside = [], [], []
        for one in table(self.judge.config, len(self.judge.ranks)):
            (beside if isinstance(one, Probe) else nearest if _short(one.first_point) in here else museum).append(one)
        known = explained + [one for one in nearest if one not in explained]
        asked = (known, self._read_off(), museum, beside) if _short(self.name) not in self.judge.unexplained else (known,)
        fits: list[Fit] = []
        for bugs in asked:
            fits += [fit for one in bugs if (fit := self._fit(one, wrong))]
            fits = [fit for fit in fits if fit.alike] or fits
            fits = [fit for fit in fits if not fit.spared] or fits
            if any(not fit.spared or fit.bug in explained for fit in fits):  # it stands wherever it would show
                break
        if not fits:
            self.judge.unexplained.add(_short(self.name))
            return None
        least = min(fit.gap for fit in fits)
        best = next(fit for fit in fits if fit.gap <= 2 * least + self.limit / 10)
        explained += [fit.bug for fit in fits if fit.bug not in explained]
        names = dict.fromkeys(fit.bug.name for fit in fits if fit.gap <= 2 * least + self.limit)
        held = set(self.held)
        return Diagnosis(
            best.bug.name, f"{self.name} is what the lab's engine makes of the same inputs with this bug: {best.bug.title}"
            f".{best.scope and f' So it is {best.scope}.'}", self.name, {"left": best.gap},
            tuple(n for n in names if n != best.bug.name), scope=best.scope,
            ranks=() if held <= set(self.ranks) else tuple(self.ranks))

    def _fit(self, bug, wrong: dict[int, torch.Tensor]) -> Fit | None:
        guess = bug.guess if hasattr(bug, "guess") else self._guess(bug.patches)
        if guess is None or any(guess[of].shape != self.held[of].shape for of in self.held):
            return None
        gap = 0.0
        for of in self.ranks:
            x, y = (tensor[wrong[of]] for tensor in (self.held[of], guess[of]))
            if not len(x):
                continue
            x, y = x.to(y.dtype), y.masked_fill(~y.isfinite(), float("nan"))
            if not torch.equal(x.isnan() | x.isinf(), y.isnan()):
                return None
            far = by_row(x.nan_to_num(0, 0, 0), y.nan_to_num(0)).max().item()
            gap = max(gap, far if far == far else float("inf"))
            if gap > self.tolerance:
                return None
        shows = {of: ~(by_row(guess[of], self.right[of]) <= self.limit) for of in self.held}
        spared = {of: shows[of] & ~self.wrong[of] for of in self.held}
        scope = self._scope(shows, wrong) if any(x.any() for of, x in spared.items() if of in self.ranks) else ""
        return Fit(bug, gap, sum(int(x.sum()) for x in spared.values()), scope, self._reduces(bug) in (None, True))

    def _guess(self, patches: Sequence) -> dict[int, torch.Tensor] | None:
        try:
            made = self.judge.made(self.name, patches)
        except Exception:  # broken code may raise anything
            made = self.judge.kept[self.judge.key(self.name, patches)] = None
        return None if made is None or self.name not in made[0] else {of: made[of][self.name] for of in self.held}

    def _reduces(self, bug) -> bool | None:
        """Whether the run's op logs show as many all-reduces as the engine with this bug, in the same way."""
        logs, layer = self.report.op_logs, layer_of(self.name)
        if not logs or layer is None or hasattr(bug, "guess"):
            return None
        done = [record.started for record in logs[0] if record.op == "all_reduce"]
        there = self.judge.made(self.name, bug.patches)[0]["reduces"]
        return any(done) == bool(there.any()) and len(done) == 1 + self.judge.last * len(there)

    def _scope(self, shows: dict, wrong: dict) -> str:
        """The kind of rows in which a bug stands."""
        shown = torch.stack([shows[of] for of in self.ranks]).any(0)
        here = torch.stack([wrong[of] for of in self.ranks]).any(0)
        sequences, positions = torch.tensor(self.places).T
        first = int(positions[here].min())
        kinds = [(IN_DECODE, self.decoded), (IN_PROMPTS, ~self.decoded)]
        kinds += [(f"in sequence {s} only", sequences == s) for s in sequences[here].unique().tolist()]
        kinds += [(f"from position {first} on", positions >= first)]
        return next((words for words, rows in kinds if torch.equal(shown & rows, here)),
                    f"in {int(here.sum())} of {len(here)} rows, the first at position {first}")

    # Bugs that are read off: positions, digits.

    def _read_off(self) -> Iterator["ReadOff"]:
        for dtype in (torch.bfloat16, torch.float16) if self.report.dtype not in SHORT else ():
            if all(torch.equal(x.to(dtype).to(x.dtype), x) for of, x in self.held.items() if of in self.ranks) and all(
                    (by_row(self.held[of], self.right[of]) < 4 * torch.finfo(dtype).eps).all() for of in self.ranks):
                yield ReadOff("low_precision", f"it was computed, or passed on, in {dtype}", self.held)
        if _short(self.name) in made_by("rope") and (used := self._positions()) is not None:
            yield used

    def _positions(self) -> "ReadOff | None":
        """As which position was each token turned? Try them all."""
        config, before = self.judge.config, inputs(self.name, self.judge.config)[0]
        candidates, layer = torch.arange(len(self.places) + 3), layer_of(self.name)
        kind = config.rope_layer_types[layer:][:1]
        cos, sin = Rotary(config.hf)(torch.empty(0, dtype=self.judge.exact), candidates, [len(candidates)], *kind)
        turn, guess, said = rotate(config.model_type), dict(self.right), ""
        for of in self.ranks:
            x = self.judge.into(before, of).to(self.judge.exact).transpose(0, 1)[None]
            made = torch.stack([turn(x, x[:, :0], cos[:, [i]], sin[:, [i]])[0][0].transpose(0, 1) for i in candidates])
            far = torch.stack([by_row(self.held[of], one) for one in made])
            used = far.argmin(0)
            guess[of] = made[used, torch.arange(len(used))]
            row = next((r for r, (u, (_, p)) in enumerate(zip(used.tolist(), self.places)) if u != p), None)
            if row is None:
                return None
            said = f"token {row}, at position {self.places[row][1]}, was turned as if it stood at {int(used[row])}"
        return ReadOff("rope_positions", f"the positions are not right: {said}", guess)


@dataclass(frozen=True, eq=False)
class ReadOff:
    """A bug of which the point's own numbers say what it makes."""

    name: str
    title: str
    guess: dict[int, torch.Tensor]


def _rounding(report: AlignReport) -> Diagnosis:
    point, worst = report.first_divergence, max(diff.relative for diff in report.local.values())
    return Diagnosis(None, f"Most likely rounding: {point.name} is off by {point.relative:.0e} of its scale, but no "
                     f"module by more than {worst:.0e} of what it should make of its own inputs.", point.name,
                     {"relative": point.relative})


def _unknown(report: AlignReport, name: str) -> Diagnosis:
    point, local = report[name], report.local[name]
    what = (f"{point.nan} NaN and {point.inf} infinite entries of {point.size}" if point.nan or point.inf else
            f"given its own inputs it is off by {local.relative:.1e} of its row's largest value")
    unseen = unseen_before(name, report.recording, report.checkpoint)
    through = f", through {', '.join(sorted(map(_short, unseen)))}, which were not recorded" * bool(unseen)
    asked = dict.fromkeys(one.name for one in table(report.checkpoint.config, report.plan.tensor_parallel_size))
    held = [r for r, shard in enumerate(report.recording.points[name]) if shard is not None]
    return Diagnosis(None, f"Unknown cause at {name}: {what}. It is computed from "
                     f"{' and '.join(inputs(name, report.checkpoint.config)) or 'the token ids'}{through}. Looked for and "
                     f"not found: {', '.join(asked)}.", name, {"relative": local.relative, "nan": point.nan},
                     ranks=() if set(held) <= set(local.guilty) else tuple(local.guilty))
