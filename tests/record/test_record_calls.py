"""What is one call and what is the next; which layers and names count; what the journal holds."""

import json
from collections import namedtuple

import pytest
import torch
from helpers.modules import IDS, Calls, Toy, only, recorded
from torch import nn

from tplab.align.check.folder import read_recorded
from tplab.record import RecordError, record


def runs_of(calls):
    return [[(entry.name, entry.nth) for entry in call.entries if entry.kind == "in"] for call in calls]


def test_a_part_that_runs_again_outside_of_its_model_begins_no_call(tmp_path):
    model = Toy()

    def run(rec):
        rec.watch(model)
        for _ in range(2):
            x = model(IDS)
            model.head(x)
            model.head(x[-1:])
    assert [names[-2:] for names in runs_of(recorded(tmp_path, run))] == [[("head", 0), ("head", 1)]] * 2


def test_a_model_that_calls_itself_begins_a_call_each_time(tmp_path):
    model = Calls(lambda x: model(x - 1) if x > 0 else x)
    calls = recorded(tmp_path, lambda rec: (rec.watch(model, "m"), model(torch.tensor(1)), model(torch.tensor(0))))
    # Each run of a watched model is a call, also one that begins while it runs.
    assert [len(names) for names in runs_of(calls)] == [1, 1, 1] and [call.status for call in calls] == ["done"] * 3


def test_ids_that_are_said_in_the_middle_of_a_module(tmp_path):
    """The engine learns its ids inside of forward: what was entered before belongs to the call before."""
    def run(rec):
        def forward(x):
            rec.inputs([7, 8])
            return inner(x)
        inner = nn.Linear(2, 2)
        model = Calls(forward, inner=inner)
        rec.watch(model, "m")
        model(torch.ones(2, 2))
    first, second = recorded(tmp_path, run)
    assert (first.input_ids, runs_of([first])) == (None, [[("m", 0)]])
    assert second.input_ids.tolist() == [7, 8]
    assert [(entry.name, entry.kind) for entry in second.entries] == [("m.inner", "in"), ("m.inner", "out")]


def test_a_module_that_ended_gives_its_input_back_to_the_right_run(tmp_path):
    """Two runs of one module, one inside the other: the inner one ends first."""
    inner = Calls(lambda x: x * 10 if x < 2 else inner(x - 1) + 1)
    (call,) = recorded(tmp_path, lambda rec: (rec.watch(Calls(lambda x: inner(x), inner=inner), "m"),
                                              rec.inputs([1]), inner(torch.tensor(2))))
    assert [(e.nth, e.tensor().item()) for e in call.entries if e.kind == "out"] == [(1, 10), (0, 11)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_ids_of_every_whole_dtype(tmp_path, dtype):
    (call,) = recorded(tmp_path, lambda rec: rec.inputs(IDS.to(dtype), positions=IDS.to(dtype)))
    assert call.input_ids.tolist() == call.positions.tolist() == IDS.tolist()


@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones(2, dtype=torch.bool), [0.5]])
def test_ids_that_are_no_whole_numbers(tmp_path, wrong):
    with pytest.raises(RecordError, match="input_ids must be whole numbers, not torch.(float32|bool)"):
        recorded(tmp_path, lambda rec: rec.inputs(wrong))


@pytest.mark.parametrize("name, kept", [("1.q", True), ("0.q", False), ("layers.1", True), ("layers.10.q", False),
                                        ("h.0", False), ("layers.0.mlp.1", False), ("norm1", True), ("lm_head", True)])
def test_the_layer_in_a_name(tmp_path, name, kept):
    (call,) = recorded(tmp_path, lambda rec: rec.tensor(name, torch.ones(2)), layers=[1])
    assert bool(call.entries) is kept and bool(call.left_out) is not kept


def test_no_layers_at_all_may_be_asked_for(tmp_path):
    (call,) = recorded(tmp_path, lambda rec: [rec.tensor(name, torch.ones(2)) for name in ("layers.0.q", "norm")],
                       layers=[])
    assert [entry.name for entry in call.entries] == ["norm"] and call.left_out[0].startswith("layers=[]: 1 tensor")


def test_what_was_left_out_counts_no_bytes_and_says_by_what(tmp_path):
    def run(rec):
        rec.tensor("layers.0.big", torch.ones(100))
        rec.tensor("layers.1.small", torch.ones(4))
        rec.tensor("layers.1.other", torch.zeros(5))
        rec.tensor("layers.1.last", torch.zeros(1))
    (call,) = recorded(tmp_path, run, layers=[1], max_bytes=20)
    assert [entry.name for entry in call.entries] == ["layers.1.small", "layers.1.last"]
    assert call.left_out == ("layers=[1]: 1 tensor, the first of them layers.0.big",
                             "max_bytes=20: 1 tensor, the first of them layers.1.other")


def test_a_tensor_recorded_again_is_another_run_of_its_name(tmp_path):
    calls = recorded(tmp_path, lambda rec: [rec.tensor("x", torch.tensor(n)) or (n == 1 and rec.inputs([n])) for n in
                                            range(4)], calls=[0])
    assert [(entry.nth, entry.tensor().item()) for entry in calls[0].entries] == [(0, 0), (1, 1)]
    assert [len(call.entries) for call in calls] == [2, 0]


def test_a_long_error_is_cut_in_the_journal(tmp_path):
    def fail(x):
        raise ValueError("x" * 5000)
    with pytest.raises(ValueError):
        recorded(tmp_path, lambda rec: (rec.watch(model := Calls(fail)), model(torch.ones(1))))
    lines = [json.loads(line) for line in (tmp_path / "rank0/manifest.jsonl").read_text().splitlines()]
    errors = [line["error"] for line in lines if line.get("error")]
    assert errors == ["ValueError: " + "x" * 288] * 2, "of the module, and of the call"
    assert read_recorded(tmp_path).ranks[0].calls[0].status == f"failed: {errors[0]}"


def test_containers_in_containers(tmp_path):
    Named = namedtuple("Named", "first second")
    deep = value = []
    for _ in range(12):
        deep.append(inner := [])
        deep = inner
    deep.append(torch.ones(1))

    def run(rec):
        rec.tensor("t", {"a": [torch.zeros(2), {"b": (torch.ones(3), None, "text")}], 3: Named(torch.ones(4), 5)})
        rec.tensor("deep", value)
        rec.tensor("six", [[[[[[torch.ones(5)]]]]]])
    (call,) = recorded(tmp_path, run)
    assert [(entry.name, entry.path, entry.shape[0]) for entry in call.entries] == [
        ("t", "a.0", 2), ("t", "a.1.b.0", 3), ("t", "3.first", 4), ("six", "0.0.0.0.0.0", 5)]


def test_a_recorder_may_follow_one_that_failed(tmp_path):
    with pytest.raises(RuntimeError), record(tmp_path / "a", rank=0, world_size=1) as rec:
        rec.inputs([1])
        raise RuntimeError("the engine")
    with record(tmp_path / "b", rank=0, world_size=1) as rec:
        rec.tensor("x", torch.ones(1))
    assert [read_recorded(tmp_path / run).ranks[0].calls[0].status for run in "ab"] == [
        "failed: RuntimeError: the engine", "done"]
    assert only(read_recorded(tmp_path / "b").ranks[0].calls[0], "x", "tensor")[0].item() == 1


def test_keyword_arguments_are_inputs(tmp_path):
    model = Calls(lambda ids, *, scale: ids * scale)
    (call,) = recorded(tmp_path, lambda rec: (rec.watch(model, "m"), model(torch.ones(2), scale=torch.tensor(3.0))))
    assert [(entry.kind, entry.path) for entry in call.entries] == [("in", "0"), ("in", "scale"), ("out", "")]


def test_buffers_and_tied_weights_under_all_their_names(tmp_path):
    model = Toy()
    model.register_buffer("table", torch.arange(3.0))
    model.layers[1].weight = model.layers[0].weight
    with record(tmp_path, rank=0, world_size=1) as rec:
        rec.parameters(model, "m")
    assert set(read_recorded(tmp_path).ranks[0].parameters) >= {"m.table", "m.layers.0.weight", "m.layers.1.weight"}
