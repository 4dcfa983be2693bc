"""The recorder beside real engines: those that raise, hang, are killed, compiled or torch's own, and without tplab."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.modules import IDS, Calls, Toy, only, recorded
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from tplab.align.check.folder import read_recorded
from tplab.record import record


class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("shapes\nnever \x1b[31mfit")


def test_an_engine_that_raises_says_where(tmp_path):
    broken = Broken()
    model = Calls(lambda x: broken(x), inner=nn.ModuleList([broken]))
    with pytest.raises(ValueError):
        recorded(tmp_path, lambda rec: (rec.watch(model), model(torch.ones(1))))
    call, = read_recorded(tmp_path).ranks[0].calls
    assert call.status == "failed: ValueError: shapes never  [31mfit" and call.last == "inner.0"
    assert call.raised == ("inner.0: ValueError: shapes never  [31mfit", ": ValueError: shapes never  [31mfit")
    assert [entry.kind for entry in call.entries] == ["in", "in"]


def test_an_exception_that_the_engine_swallows_is_seen(tmp_path):
    broken = Broken()

    def function(x):
        try:
            return broken(x)
        except ValueError:
            return x

    model = Calls(function, rotary=broken)
    call, = recorded(tmp_path, lambda rec: (rec.watch(model), model(torch.ones(1))))
    assert call.status == "done"
    assert call.raised == ("rotary: ValueError: shapes never  [31mfit",)


def test_a_call_is_readable_while_it_hangs(tmp_path):
    seen = []
    wait = Calls(lambda x: seen.append(read_recorded(tmp_path).ranks[0].calls[-1]))
    model = Calls(lambda x: (linear(x), wait(x)), linear=(linear := nn.Linear(2, 2)), wait=wait)
    recorded(tmp_path, lambda rec: (rec.watch(model), model(torch.ones(2)), model(torch.ones(2))))
    assert [(call.index, call.status, call.last) for call in seen] == [
        (0, "cut off", "wait"), (1, "cut off", "wait")]
    assert only(seen[1], "linear")[0].shape == (2,)


@pytest.mark.parametrize("how", ["compiled", "compiled in place", "compiled afterwards"])
def test_compiled_modules_are_recorded_uncompiled(tmp_path, how):
    model = Toy()
    call = model
    expected = model(IDS)
    if how == "compiled":
        call = torch.compile(model, backend="eager")
    elif how == "compiled in place":
        model.compile(backend="eager")
    call(IDS)  # compiled before a hook is there

    def run(rec):
        nonlocal call
        rec.parameters(call if how == "compiled" else model)
        rec.watch(call if how == "compiled" else model)
        if how == "compiled afterwards":
            call = torch.compile(model, backend="eager")
        assert torch.equal(call(IDS), expected)
    recording, = recorded(tmp_path, run)
    assert len(only(recording, "layers.0")) == 2 and torch.equal(only(recording, "")[0], expected)
    assert set(read_recorded(tmp_path).ranks[0].parameters) == set(dict(Toy().named_parameters()))
    assert torch.compiler.is_compiling() is False


def test_tensors_of_torchs_own_tensor_parallelism_are_this_ranks_share(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
        model = Calls(lambda x: (all_reduce(x, "sum", mesh), weight))
        with record(tmp_path / "run", rank=0, world_size=1) as rec:
            rec.parameters({"weight": weight})
            rec.watch(model)
            waits, _ = model(torch.ones(2, 4))
            assert type(waits) is not torch.Tensor
        rank, = read_recorded(tmp_path / "run").ranks
    finally:
        dist.destroy_process_group()
    assert torch.equal(rank.parameters["weight"].tensor(), weight.to_local())
    assert [entry.tensor().tolist() for entry in rank.calls[0].entries] == [
        [[1] * 4] * 2, [[1] * 4] * 2, weight.to_local().tolist()]


ENGINE = """
import os, signal, sys
import torch, torch.distributed as dist

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tplab", "numpy", "transformers"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, os.path.dirname(__file__))
from record import record

class Row(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if os.environ["DIES"] == os.environ["RANK"]:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(y)
        return y

rank, world_size = int(os.environ["RANK"]), 2
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=world_size)
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), Row(4, 4))
with record(sys.argv[2], rank=rank, world_size=world_size) as rec:
    rec.watch(model)
    rec.inputs([1, 2], [0, 1])
    with torch.inference_mode():
        model(torch.ones(2, 4))
dist.destroy_process_group()
os._exit(0)  # how gloo's threads meet the end of Python is no matter of the recorder
"""


@pytest.mark.parametrize("dies", ["", "1"])
def test_one_file_beside_an_engine_where_tplab_is_not_installed(tmp_path, root, dies):
    shutil.copy(root / "tplab/record.py", tmp_path)
    (tmp_path / "engine.py").write_text(ENGINE)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"DIES": dies}
    ranks = [subprocess.Popen([sys.executable, "-I", tmp_path / "engine.py", tmp_path / "store", tmp_path / "run"],
                              env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
             for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in reversed(ranks)][::-1]
    finally:
        for rank in ranks:
            rank.kill()
    calls = [rank.calls[0] for rank in read_recorded(tmp_path / "run").ranks]
    assert all(call.input_ids.tolist() == [1, 2] and call.positions.tolist() == [0, 1] for call in calls)
    partial = [only(call, "0")[0] for call in calls]
    assert partial[0].shape == (2, 4) and not torch.equal(*partial)
    if dies:
        assert ranks[1].returncode == -signal.SIGKILL
        assert (calls[1].status, calls[1].last) == ("cut off", "1") and not only(calls[1], "1")
        assert calls[0].status.startswith("failed: RuntimeError"), errors[0]
        assert calls[0].raised[0].startswith("1: RuntimeError")
    else:
        assert [rank.returncode for rank in ranks] == [0, 0], errors
        assert torch.equal(only(calls[0], "1")[0], only(calls[1], "1")[0])
