"""The recorder under other people's code: tensors without memory, threads, graphs, compilers, options of all kinds."""

import gc
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.modules import recorded
from torch import nn

from tplab.align.check.folder import read_recorded
from tplab.record import RecordError, record


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as quantised weights are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.linear:
            return torch.ops.aten.linear(args[0], args[1].inner, *args[2:])
        if function.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.alias):
            return Wrapper(args[0].inner)
        raise NotImplementedError(f"no {function}")


def test_tensors_without_memory_are_said_and_never_read(tmp_path):
    from torch._subclasses import FakeTensorMode

    def run(rec):
        rec.tensor("wrapper", Wrapper(torch.ones(3)))
        with FakeTensorMode():
            rec.tensor("fake", torch.ones(3))
        model = nn.Linear(3, 3)
        rec.watch(model, "m")
        torch.vmap(model)(torch.ones(2, 3))
        model.register_parameter("more", nn.Parameter(Wrapper(torch.ones(2)), False))
        rec.parameters(model, "w")
        rec.parameters(nn.LazyLinear(4), "lazy")
        rec.tensor("good", torch.ones(1))

    call, = recorded(tmp_path, run)
    assert [entry.name for entry in call.entries] == ["good"]
    assert {why.partition(" cannot")[0] for why in call.left_out} == {"Wrapper", "FakeTensor", "Tensor"}
    rank, = read_recorded(tmp_path).ranks
    assert set(rank.parameters) == {"w.weight", "w.bias"}


def test_a_recorder_that_was_dropped_leaves_no_trace(tmp_path):
    model = nn.Linear(2, 2)
    rec = record(tmp_path / "a", rank=0, world_size=1)
    rec.watch(model)
    del rec
    gc.collect()
    assert not model._forward_hooks and not model._forward_pre_hooks
    with record(tmp_path / "b", rank=0, world_size=1):
        pass


def test_a_call_in_which_no_module_ran_is_said(tmp_path):
    model = nn.Linear(2, 2)

    def run(rec):
        rec.watch(model)
        rec.inputs([3, 4])
        model(torch.ones(2, 2))
        rec.inputs([5])  # a graph is replayed
    with pytest.warns(UserWarning, match="no watched module ran in call 1; a replayed graph calls none"):
        first, second = recorded(tmp_path, run)
    assert not first.left_out and second.left_out[0].startswith("no watched module ran in this call")


@pytest.mark.parametrize("what, says", [
    (lambda rec: rec.watch(torch.jit.script(nn.Linear(2, 2))), "a ScriptModule runs its modules without hooks"),
    (lambda rec: rec.inputs([[1, 2], [3]]), "in lines of one length"),
    (lambda rec: record(rec._folder / "x", rank=0, world_size=1), "this thread records already")])
def test_what_cannot_be_recorded_is_one_sentence(tmp_path, what, says):
    with record(tmp_path / "run", rank=0, world_size=1) as rec, pytest.raises(RecordError, match=says):
        what(rec)


@pytest.mark.parametrize("options", [dict(layers=0), dict(layers="01"), dict(calls="1"), dict(calls=True),
                                     dict(max_bytes="1"), dict(layers=[0.5])])
def test_options_of_another_kind_are_refused(tmp_path, options):
    with pytest.raises(RecordError, match=f"{next(iter(options))} must be"):
        record(tmp_path / "run", rank=0, world_size=1, **options)
    assert not (tmp_path / "run").exists()


COMPILED = """
import sys, torch
from record import record
model = torch.nn.Linear(2, 2)
assert "torch._dynamo" not in sys.modules
with record(sys.argv[1], rank=0, world_size=1) as rec:
    rec.watch(model)
    torch.compile(model, fullgraph=True, backend="eager")(torch.ones(1, 2))
"""


def test_a_model_that_is_compiled_whole_after_it_is_watched(tmp_path, root):
    shutil.copy(root / "tplab/record.py", tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILED, tmp_path / "run"], cwd=tmp_path, capture_output=True,
                          text=True)
    assert not done.returncode, done.stderr
    assert len(read_recorded(tmp_path / "run").ranks[0].calls[0].entries) == 2
