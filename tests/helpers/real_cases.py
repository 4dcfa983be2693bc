"""A guilty point of a real, small run: what stands there is a test's own, all before it is what the run gave."""

from dataclasses import replace
from types import SimpleNamespace as Some

import torch
from helpers.checkpoints import make_checkpoint
from helpers.sentences import hold

from tplab.align.diagnose.case import Case
from tplab.align.diagnose.mistakes import TABLE
from tplab.align.gather import recorded, trace_on_rank
from tplab.align.guilty import Judge, local_diffs
from tplab.align.points import layout
from tplab.align.recording import Shard
from tplab.align.report import PointDiff
from tplab.checkpoint import open_checkpoint
from tplab.checkpoint.layout import read_part, tensor_parts
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

AT = "layers.1."
TEXTS = [[5, 60, 7, 33, 2, 9, 41], [8, 3, 66, 12, 5]]


class Report(Some):
    def __getitem__(self, name):
        return PointDiff(name, layout(name), (1,), 0.25, 0.25, 0.5, self.nan, 0, 100, 0.0, False, 2e-5)


class RealRun:
    """``x(name, rank)`` is what a rank had at a point, ``w(name)`` a tensor of the checkpoint."""

    def __init__(self, folder, model="llama", tp=2, dtype=torch.float32, texts=TEXTS, **shape):
        self.ckpt = open_checkpoint(make_checkpoint(folder, model, **shape))
        self.config, self.tp, self.texts, self.dtype = self.ckpt.config, tp, texts, dtype
        self.plan = ShardPlan.from_config(self.config, tp)
        traces = [ran.points for ran in logical_ranks(tp, trace_on_rank, self.ckpt, self.plan, dtype, texts)]
        places = [(number, position) for number, text in enumerate(texts) for position in range(len(text))]
        self.recording = recorded(traces, self.plan, dtype, texts, places, [len(texts[s]) for s, _ in places], places)
        self.positions = torch.tensor([position for _, position in places])
        with self.ckpt.reader() as reader:
            self.weights = {name: read_part(part, reader).to(dtype) for name, part in tensor_parts(
                self.config, self.ckpt.tensors).items()}

    def x(self, name, rank):
        return self.recording.points[name][rank].tensor

    def w(self, name):
        return self.weights[name]

    def own(self, name, rank):
        """The global heads, columns or rows that a rank holds of a point."""
        return getattr(self.plan.ranks[rank], layout(name))

    def case(self, name, held, hide=(), num_keys=None, decode=None, logs=(), nan=0, instead=None, origins=None):
        """``held``: a tensor per rank; ``hide``: short names of points that were not recorded; ``instead``: what else
        was held, ``{point: a tensor per rank}``; ``num_keys``, ``origins``: those of the rows."""
        def shard(name, rank, tensor):
            how = layout(name)
            return Shard(tensor, how, () if how in ("replicated", "partial") else self.own(name, rank))
        points = {one: shards for one, shards in self.recording.points.items() if one.rpartition(".")[2] not in hide}
        for one, tensors in {name: held, **(instead or {})}.items():
            points[one] = [shard(one, rank, tensor.to(self.dtype)) for rank, tensor in enumerate(tensors)]
        recording = replace(self.recording, points=points, num_keys=num_keys or self.recording.num_keys,
                            origins=origins or self.recording.origins)
        computed = [list(range(len(text))) for text in self.texts] if num_keys else None
        report = Report(plan=self.plan, checkpoint=self.ckpt, recording=recording, dtype=self.dtype, decode=decode,
                        computed=computed, ids=self.texts, op_logs=logs, guilty=[name], nan=nan,
                        local={name: Judge(recording, self.ckpt, self.plan).diff(name)})
        return Case(report, name)

    def changed(self, name, change):
        """``change(tensor, rank)`` of what each rank had."""
        return [change(self.x(name, rank), rank) for rank in range(self.tp)]

    def diffs(self):
        return local_diffs(self.recording, self.ckpt, self.plan)


def asked(run, asks, held, name, near=1.0003, **more):
    """What an entry of the table says of ``held``, the tensors at a point; of numbers a little off it says nothing."""
    assert asks(run.case(name, [x * near for x in held], **more)) is None, "near is not there"
    return asks(run.case(name, held, **more))


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def asks_for(*names):
    """Asks the entries of the table that can give one of these names, about a case; its words are held."""
    def ask(case):
        return hold(next((found for one in TABLE if case.op in one.subjects and {*names} & {*one.names}
                          and (found := one(case))), None))
    return ask
