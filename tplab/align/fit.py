"""``GuiltyPoint``: which bug makes of a run's own inputs what the run has at one point?"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tplab.align.diagnosis import Diagnosis, one_digit, sentence_of
from tplab.align.floors import SHORT
from tplab.align.guilty import by_row, unseen_before
from tplab.align.points import POINTS, layer_of, layout, short_name
from tplab.align.read_off import OTHERS, ReadOff, few_digits
from tplab.align.replay import REDUCES
from tplab.align.report import AlignReport
from tplab.faults import Fault
from tplab.faults.probes import Probe
from tplab.patch import Patch, original
from tplab.ranks import rank as this_rank

Bug = Fault | Probe | ReadOff
Rows = dict[int, torch.Tensor]  # rank → of each row, [rows] boolean
IN_DECODE, IN_PROMPTS = "in decode calls only", "in calls of several tokens only"


@dataclass(frozen=True)
class Fit:
    """How a bug explains the wrong rows of a guilty point."""

    bug: Bug
    gap: float  # what it leaves of the difference, relative to a row's largest value
    spared: int  # rows in which it would show, and the run is right
    elsewhere: bool  # whether it would also show on ranks that are right
    scope: str  # where it stands, in words
    alike: int  # how well the all-reduces fit the run's: 2, 1 or 0


class GuiltyPoint:
    """One guilty point of a run: what each rank holds there, what it should hold, and which rows are wrong."""

    def __init__(self, report: AlignReport, name: str):
        judge = report.judge
        self.report, self.name, self.judge, self.ranks = report, name, judge, report.local[name].guilty
        self.short, self.layer = short_name(name), layer_of(name)
        self.held = {rank: judge.held(name, rank) for rank in judge.judged_ranks(name)}
        self.right = {rank: judge.expected(name, rank) for rank in self.held}
        limits = {rank: judge.tolerance(name, rank) for rank in self.held}
        off = {rank: by_row(x, self.right[rank]) for rank, x in self.held.items()}
        self.wrong: Rows = {rank: ~(off[rank] <= limits[rank]) for rank in self.held}
        self.finite: Rows = {rank: x.flatten(1).isfinite().all(1) for rank, x in self.held.items()}
        self.off, self.limit = off, max(limits.values())
        most = max(off[rank][self.wrong[rank]].max().item() for rank in self.ranks)
        self.tolerance = min((2 if report.dtype in SHORT else 3) * self.limit, most / 4)
        self.places = report.recording.places_of(name)
        keys = dict(zip(report.recording.places, report.recording.num_keys))
        several = {(s, keys[s, p]) for s, p in self.places if keys.get((s, p - 1)) == keys[s, p]}
        self.decoded = torch.tensor([p > 0 and keys[s, p] == p + 1 and (s, keys[s, p]) not in several
                                     for s, p in self.places])
        # The operations between the recorded points before it and this one.
        self.shorts = {*map(short_name, [name, *unseen_before(name, report.recording, report.checkpoint)])}
        self.ops = {POINTS[short].op for short in self.shorts}
        self._guesses: dict[tuple[Patch, ...], dict[int, torch.Tensor] | None] = {}
        self._started: dict[tuple[Patch, ...], torch.Tensor] = {}

    def diagnoses(self, explained: list[Bug], known_only: bool = False) -> list[Diagnosis]:
        """The bug that explains all wrong rows, or one for decode calls and one for prompts, or for the rows without
        NaN and infinity; a diagnosis without a name for rows that nothing explains.

        Args:
            explained: bugs that explained other points, which are asked first; new ones are added.
            known_only: ask no others.
        """
        for parts in ([None], [self.decoded, ~self.decoded], [self.finite, {r: ~x for r, x in self.finite.items()}]):
            rows = [{rank: wrong if part is None else wrong & (part[rank] if isinstance(part, dict) else part)
                     for rank, wrong in self.wrong.items()} for part in parts]
            rows = [wrong for wrong in rows if any(wrong[rank].any() for rank in self.ranks)]
            if len(rows) == len(parts):
                named = [self._named(wrong, explained, known_only) for wrong in rows]
                if any(named):
                    return [each or self.unknown(wrong) for each, wrong in zip(named, rows)]
        self.judge.unexplained.add(self.short)
        return [self.unknown(self.wrong)]

    def _named(self, wrong: Rows, explained: list[Bug], known_only: bool) -> Diagnosis | None:
        fits: list[Fit] = []
        rows = {rank: wrong[rank].nonzero()[:, 0] for rank in self.ranks if wrong[rank].any()}
        for bugs in self._asked(explained, known_only):
            fits += [fit for bug in bugs if (fit := self._fit(bug, wrong, rows))]
            fits = [fit for fit in fits if fit.alike == max(each.alike for each in fits)]
            fits = [fit for fit in fits if not fit.spared] or fits
            fits = [fit for fit in fits if not fit.elsewhere] or fits
            if any(not fit.spared or fit.bug in explained for fit in fits):  # it stands wherever it would show
                break
        if not fits:
            return None
        least = min(fit.gap for fit in fits)
        best = next(fit for fit in fits if fit.gap <= 2 * least + self.limit / 10)
        explained += [fit.bug for fit in fits if fit.bug not in explained]
        names = dict.fromkeys(fit.bug.name for fit in fits if fit.gap <= 2 * least + self.limit)
        ranks = getattr(best.bug, "ranks", ()) or (() if {*self.held} <= {*self.ranks} else tuple(self.ranks))
        evidence = self._evidence(wrong)
        if not isinstance(best.bug, ReadOff) or best.bug.computed:
            evidence += ". The lab's engine with this bug gives the same rows"
        return Diagnosis(best.bug.name, sentence_of(best.bug.title, evidence, self.name, best.scope, ranks), self.name,
                         {"off": self._most(wrong), "left": best.gap}, tuple(n for n in names if n != best.bug.name),
                         scope=best.scope, ranks=ranks)

    def _asked(self, explained: list[Bug], known_only: bool) -> Iterable[list[Bug]]:
        """The bugs to be asked, in groups: those that explained other points; the museum's that first show here; few
        digits; the rest of the museum; the probes; what else can be read off; all of them on one rank."""
        yield [*explained]
        if known_only:
            return
        faults = [bug for bug in self.judge.bugs if isinstance(bug, Fault)]
        nearest = [bug for bug in faults if short_name(bug.first_point) in self.shorts]
        yield [bug for bug in nearest if bug not in explained]
        if self.short in self.judge.unexplained:
            return  # the same point of an earlier layer was not explained either
        yield list(few_digits(self))
        yield [bug for bug in faults if bug not in nearest and self._can_show(bug)]
        probes = [bug for bug in self.judge.bugs if isinstance(bug, Probe) and self._can_show(bug)]
        yield probes
        yield [bug for ask in OTHERS for bug in ask(self)]
        summands = {short for short in self.shorts if layout(short) == "partial" or short == "embed"} - {self.short}
        stage = self.judge.stage(self.name)
        if len(stage) > 1 and (summands or self.short == "embed"):
            yield [on_rank(bug, at, rank) for at, rank in enumerate(stage) for bug in [*nearest, *probes]]

    def _can_show(self, bug: Fault | Probe) -> bool:
        """Whether it changes an operation between the recorded points before this one and this one."""
        return bool(self.ops & ({*bug.ops} if isinstance(bug, Probe) else {POINTS[short_name(bug.first_point)].op}))

    def _fit(self, bug: Bug, wrong: Rows, rows: dict[int, torch.Tensor]) -> Fit | None:
        """``rows``: the numbers of the wrong ones."""
        guess = self._guess(bug)
        if guess is None or any(guess[rank].shape != x.shape for rank, x in self.held.items()):
            return None
        gap, finite = 0.0, False
        for rank, numbers in rows.items():
            x, y = (tensor.index_select(0, numbers) for tensor in (self.held[rank], guess[rank]))
            if not torch.equal(x.isfinite(), y.isfinite()):
                return None
            finite = finite or bool((wrong[rank] & self.finite[rank]).any())
            far = by_row(x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)).max().item()
            gap = max(gap, far if far == far else float("inf"))
            if gap > self.tolerance:
                return None
        # Where the run must be wrong with this bug, although it is rounded.
        shows = {rank: ~(by_row(guess[rank], self.right[rank]) <= 2 * self.limit) for rank in self.held}
        spared = sum(int((shows[rank] & ~self.wrong[rank]).sum()) for rank in self.ranks)
        scope = self._scope(shows, wrong) if spared else ""
        if not finite and (spared and scope != IN_PROMPTS or any(
                bool((self.finite[rank] & ~self.decoded & ~guess[rank].flatten(1).isfinite().all(1)).any())
                for rank in rows)):
            return None  # NaN and infinity fit too much: here other rows would hold them, too
        elsewhere = any(bool(shows[rank].any()) for rank in shows if rank not in self.ranks)
        if elsewhere and self._adds_less(bug):
            return None  # a rank has the sum, so all ranks took part in it
        return Fit(bug, gap, spared, elsewhere, scope, self._reduces_alike(bug))

    def _guess(self, bug: Bug) -> dict[int, torch.Tensor] | None:
        """What each rank would hold with this bug; None if it ends in an error or never gets here."""
        if isinstance(bug, ReadOff):
            return bug.guess(self)
        if bug.patches not in self._guesses:
            try:
                made = self.judge.broken(self.name, bug.patches)
                self._guesses[bug.patches] = {rank: made[rank][self.name] for rank in self.held}
            except Exception:  # broken code may raise anything: then it is not what the run did
                self._guesses[bug.patches] = None
        return self._guesses[bug.patches]

    def _reduces_alike(self, bug: Bug) -> int:
        """How the run's op logs fit the all-reduces of the engine with this bug: 2 if all layers can have it, or the
        logs do not tell; 1 if this layer can, beside other bugs; 0 if not."""
        logs, layers = self.report.op_logs, self.judge.config.num_layers
        if not logs or not self._adds_up(bug):
            return 2
        with_bug, right = self._all_reduces(bug.patches), self._all_reduces()
        done = [record.started for record in logs[0] if record.op == "all_reduce"]
        if any(done) == bool(with_bug.any()) and len(done) == 1 + layers * len(with_bug):
            return 2
        fewer = len(with_bug) < len(right) and len(done) >= 1 + layers * len(right)
        return int(not fewer and any(done) == bool(with_bug.any()))

    def _adds_less(self, bug: Bug) -> bool:
        """Whether the engine with this bug has fewer all-reduces in the layer than the right one."""
        return self._adds_up(bug) and len(self._all_reduces(bug.patches)) < len(self._all_reduces())

    def _adds_up(self, bug: Bug) -> bool:
        """Whether the point is a sum over the ranks, and the bug one that can be replayed."""
        return self.layer is not None and not isinstance(bug, ReadOff) and self.short in ("o_proj", "mlp")

    def _all_reduces(self, patches: tuple[Patch, ...] = ()) -> torch.Tensor:
        """Of each all-reduce of the layer whether it was only started there; with patches or, without, in the right
        engine."""
        if patches not in self._started:
            name = f"layers.{self.layer}.output"
            made = self.judge.broken(name, patches) if patches else self.judge.made(name)
            self._started[patches] = made[min(made)][REDUCES]
        return self._started[patches]

    def _scope(self, shows: Rows, wrong: Rows) -> str:
        """The kind of rows in which a bug stands."""
        shown = torch.stack([shows[rank] for rank in self.ranks]).any(0)
        wrong_rows = torch.stack([wrong[rank] for rank in self.ranks]).any(0)
        sequences, positions = torch.tensor(self.places).T
        first = int(positions[wrong_rows].min())
        kinds = [(IN_DECODE, self.decoded), (IN_PROMPTS, ~self.decoded)]
        kinds += [(f"in sequence {s} only", sequences == s) for s in sequences[wrong_rows].unique().tolist()]
        kinds += [(f"from position {first} on", positions >= first)]
        return next((words for words, rows in kinds if not (wrong_rows & ~rows | shown & rows & ~wrong_rows).any()),
                    f"in {int(wrong_rows.sum())} of {len(wrong_rows)} rows, the first at position {first}")

    def _most(self, wrong: Rows) -> float:
        """The largest difference in these rows, relative to a row's largest value; infinite for NaN alone."""
        rows = {rank: wrong[rank] & self.finite[rank] for rank in self.ranks}
        return max((self.off[rank][rows[rank]].max().item() for rank in self.ranks if rows[rank].any()),
                   default=float("inf"))

    def _evidence(self, wrong: Rows) -> str:
        """The line of numbers: how many rows are wrong, and by how much."""
        rows, most = torch.stack([wrong[rank] for rank in self.ranks]).any(0), self._most(wrong)
        count = f"{int(rows.sum())} of {len(rows)} rows"
        if most == float("inf"):
            return f"{count} hold NaN or infinity that their inputs do not hold"
        return f"{count} differ from what their inputs give, by up to {one_digit(most)} times a row's largest value"

    def unknown(self, wrong: Rows) -> Diagnosis:
        """A diagnosis without a name: the rows, their difference, and what was ruled out."""
        everywhere = {rank: torch.ones_like(rows) for rank, rows in wrong.items()}
        rows = torch.stack([wrong[rank] for rank in self.ranks]).any(0)
        scope = "" if rows.all() else self._scope(everywhere, wrong)
        ranks = () if {*self.held} <= {*self.ranks} else tuple(self.ranks)
        evidence = self._evidence(wrong)
        if unseen := sorted(self.shorts - {self.short}):
            evidence += f"; {', '.join(unseen)} before it {'was' if len(unseen) == 1 else 'were'} not recorded"
        calls = torch.tensor([self.report.recording.call_of[place] for place in self.places])
        first = int(calls[rows].min())
        if first > calls.min():  # an engine that computes a text anew has all of its rows in the last call
            evidence += f"; the calls before call {first} are right"
        asked = dict.fromkeys(bug.name for bug in self.judge.bugs if self._can_show(bug))
        return Diagnosis(None, f"{sentence_of('unknown cause', evidence, self.name, scope, ranks)} Looked for and not "
                         f"found: {', '.join(asked)}.", self.name, {"off": self._most(wrong)}, scope=scope, ranks=ranks)


@dataclass(frozen=True)
class OnRank(Probe):
    """A bug on some ranks alone."""

    ranks: tuple[int, ...] = ()


def on_rank(bug: Fault | Probe, at: int, rank: int) -> OnRank:
    """The same bug on one rank alone, which is number ``at`` of those that compute together."""
    def gated(patch: Patch) -> Patch:
        def wrong(*args, **options):
            return (patch.replacement if this_rank() == at else original(patch.target))(*args, **options)
        return Patch(patch.target, wrong)
    return OnRank(bug.name, bug.title, tuple(map(gated, bug.patches)), (), (rank,))
