"""What is one call and what is the next; which layers and names count; what the journal holds."""

from collections import namedtuple

import pytest
import torch
from helpers.modules import IDS, Calls, Toy, recorded
from torch import nn

from tplab.record import RecordError


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


@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones(2, dtype=torch.bool), [0.5]])
def test_ids_that_are_no_whole_numbers(tmp_path, wrong):
    with pytest.raises(RecordError, match="input_ids must be whole numbers, not torch.(float32|bool)"):
        recorded(tmp_path, lambda rec: rec.inputs(wrong))


@pytest.mark.parametrize("name, kept", [("1.q", True), ("0.q", False), ("layers.1", True), ("layers.10.q", False),
                                        ("h.0", False), ("layers.0.mlp.1", False), ("norm1", True), ("lm_head", True)])
def test_the_layer_in_a_name(tmp_path, name, kept):
    (call,) = recorded(tmp_path, lambda rec: rec.tensor(name, torch.ones(2)), layers=[1])
    assert bool(call.entries) is kept and bool(call.left_out) is not kept


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
