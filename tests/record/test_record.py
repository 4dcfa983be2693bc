"""The recorder: everything an engine may hand over is read back as it was, and kept apart by calls."""

import shutil
import threading
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from helpers.modules import IDS, Calls, Toy, only, recorded
from safetensors.torch import load_file
from torch import nn

from tplab.align.check.folder import RecordingError, read_recorded
from tplab.record import DTYPES, RecordError, record

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: torch.Tensor
    states: tuple = ()
    text: str = ""


def shape_of(call):
    return [(entry.name, entry.kind, entry.path, entry.nth) for entry in call.entries]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_two_ranks_are_read_back_as_they_ran(tmp_path, mode):
    models = [Toy(), Toy()]
    with mode():
        outputs = [model.head(model(IDS)) for model in models]
        for rank, model in enumerate(models):
            with record(tmp_path / "run", rank=rank, world_size=2) as rec:
                rec.parameters(model)
                rec.watch(model)
                rec.inputs(IDS, IDS.tolist(), [0] * 5)
                assert torch.equal(model.head(model(IDS)), outputs[rank])
    recording = read_recorded(str(tmp_path / "run"))
    assert recording.world_size == 2
    for rank, model in enumerate(models):
        call, = recording.ranks[rank].calls
        assert (call.status, call.last, call.left_out) == ("done", "head", ())
        assert call.input_ids.tolist() == call.positions.tolist() == IDS.tolist() and call.sequences == [0] * 5
        assert shape_of(call) == [
            ("", "in", "0", 0), ("embed", "in", "0", 0), ("embed", "out", "", 0),
            ("layers.0", "in", "0", 0), ("layers.0", "out", "", 0), ("layers.0", "in", "0", 1),
            ("layers.0", "out", "", 1), ("layers.1", "in", "0", 0), ("layers.1", "out", "", 0), ("", "out", "", 0),
            ("head", "in", "0", 0), ("head", "out", "", 0)]
        assert [entry.order for entry in call.entries] == list(range(12))
        assert {entry.name: entry.module_class for entry in call.entries}[""] == "Toy"
        assert torch.equal(only(call, "head")[0], outputs[rank])
        for name, weight in model.named_parameters():
            assert torch.equal(recording.ranks[rank].parameters[name].tensor(), weight)
            assert torch.equal(load_file(tmp_path / f"run/rank{rank}/parameters.safetensors")[name], weight)
        kept = load_file(tmp_path / f"run/rank{rank}/call0.safetensors")
        assert torch.equal(kept["head out  0"], outputs[rank]) and len(kept) == 6  # an input is kept as an output
    assert not models[0]._forward_hooks and not models[0].head._forward_pre_hooks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_form(tmp_path, dtype):
    whole = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
    forms = [whole, whole.transpose(0, 2), whole[:, 1], whole[..., ::2], whole[0, 0, 0], whole[:0], whole[:, :1].expand(
        2, 3, 4), whole.reshape(-1)[1:], whole.unsqueeze(0), nn.Parameter(whole, requires_grad=False)]
    if dtype == torch.complex64:
        forms += [(whole * 1j).conj(), (whole * 1j).conj().imag, (whole * 1j).conj().imag[0, 0, 1]]
    call, = recorded(tmp_path, lambda rec: [rec.tensor(f"form {at}", form) for at, form in enumerate(forms)])
    for entry, form in zip(call.entries, forms, strict=True):
        assert entry.shape == form.shape and entry.dtype == form.dtype
        assert torch.equal(entry.tensor().flatten().view(torch.uint8), form.contiguous().resolve_conj().resolve_neg()
                           .flatten().view(torch.uint8))


def test_what_cannot_be_kept_is_said(tmp_path):
    def run(rec):
        rec.tensor("meta", torch.empty(2, device="meta"))
        rec.tensor("sparse", torch.eye(2).to_sparse())
        rec.tensor("nested", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))
        rec.tensor("wide", torch.ones(2, dtype=torch.complex128))
        rec.tensor("good", torch.ones(2))
    call, = recorded(tmp_path, run)
    assert [entry.name for entry in call.entries] == ["good"]
    assert [why.split("cannot be kept: ")[1] for why in call.left_out] == [
        f"1 tensor, the first of them {name}" for name in ("meta", "sparse", "nested", "wide")]


def test_tuples_keywords_and_nested_outputs_by_their_paths(tmp_path):
    def function(first, *, states, scale=None):
        return Output(first, (first + 1, Pair(first + 2, {"deep": [first + 3]})))

    def run(rec):
        model = Calls(function)
        rec.watch(model, "m")
        rec.tensor("m", {"\n": torch.ones(9)})
        model(torch.ones(1), states=[torch.ones(2), None, torch.ones(3)], scale=2.0)
    call, = recorded(tmp_path, run)
    assert {entry.nth for entry in call.entries} == {0}
    assert [(entry.kind, entry.path, entry.shape) for entry in call.entries] == [
        ("tensor", "'\\n'", (9,)),
        ("in", "0", (1,)), ("in", "states.0", (2,)), ("in", "states.2", (3,)), ("out", "logits", (1,)),
        ("out", "states.0", (1,)), ("out", "states.1.left", (1,)), ("out", "states.1.right.deep.0", (1,))]
    assert call.entries[-1].tensor().item() == 4


def test_a_module_that_runs_within_itself(tmp_path):
    inner = Calls(lambda x: inner(x - 1) + 10 if x > 0 else x)
    model = Calls(lambda x: inner(x), inner=inner)
    call, = recorded(tmp_path, lambda rec: (rec.watch(model), model(torch.tensor(2))))
    outputs = [entry for entry in call.entries if (entry.name, entry.kind) == ("inner", "out")]
    assert [(entry.nth, entry.tensor().item()) for entry in outputs] == [
        (2, 0), (1, 10), (0, 20)]


def test_calls_are_kept_apart(tmp_path):
    body, head = Toy(), nn.Linear(8, 16)

    def run(rec):
        rec.watch(body)
        rec.watch(head, "lm_head")
        for ids in (IDS, IDS[:1]):  # prefill and a decode step, nothing said
            head(body(ids))
        rec.inputs(IDS[:2])
        head(body(IDS[:2]))
        rec.inputs(IDS[:3])
    calls = recorded(tmp_path, run)
    assert [call.index for call in calls] == [0, 1, 2, 3] and [call.status for call in calls] == ["done"] * 4
    assert [[len(tensor) for tensor in only(call, "lm_head", "in")] for call in calls] == [[5], [1], [2], []]
    assert [call.input_ids is None for call in calls] == [True, True, False, False]


def test_a_watched_model_within_another_begins_no_call(tmp_path):
    inner = nn.Linear(8, 8)
    outer = Calls(lambda x: inner(inner(x)))
    calls = recorded(tmp_path, lambda rec: (rec.watch(inner, "inner"), rec.watch(outer, "outer"), outer(torch.ones(8))))
    assert [(name, nth) for name, _, _, nth in shape_of(calls[0])] == [
        ("outer", 0), ("inner", 0), ("inner", 0), ("inner", 1), ("inner", 1), ("outer", 0)] and len(calls) == 1


def test_layers_calls_and_bytes_are_bounded_and_what_was_left_out_is_said(tmp_path):
    model = Toy()

    def run(rec):
        rec.watch(model)
        rec.parameters(model)
        for _ in range(4):
            model(IDS)
    calls = recorded(tmp_path / "layers", run, layers=[1])
    assert {entry.name for entry in calls[0].entries} == {"", "embed", "layers.1"}
    assert calls[0].left_out == ("layers=[1]: 4 tensors, the first of them layers.0",)
    rank = read_recorded(tmp_path / "layers").ranks[0]
    assert "layers.0.weight" not in rank.parameters and "layers.1.weight" in rank.parameters

    for limit, kept in ((2, [0, 1]), ([3, 1], [1, 3]), ([], [])):
        calls = recorded(tmp_path / f"calls{limit}", run, calls=limit)
        assert [call.index for call in calls if call.entries] == kept and len(calls) == 4
        assert [call.left_out == ("calls=: this call",) for call in calls] == [at not in kept for at in range(4)]

    calls = recorded(tmp_path / "bytes", lambda rec: (rec.watch(model), model(IDS)), max_bytes=40 + 160)
    assert sum(len(load_file(file)) for file in (tmp_path / "bytes").rglob("*.safetensors")) == 2
    assert {entry.name for entry in calls[0].entries} == {"", "embed", "layers.0"}  # its input was embed's output
    assert calls[0].left_out == ("max_bytes=200: 6 tensors, the first of them layers.0",)
    calls = recorded(tmp_path / "nothing", run, max_bytes=0)
    assert [call.entries for call in calls] == [()] * 4 and calls[3].left_out[0].startswith("max_bytes=0: 10 tensors")


def test_parameters_of_several_models_tied_ones_and_dictionaries(tmp_path):
    model = Toy()
    model.head.weight = model.embed.weight
    model.register_buffer("inv_freq", torch.ones(2), persistent=False)
    with record(tmp_path, rank=0, world_size=1) as rec:
        rec.parameters(model)
        rec.parameters({"wq": torch.ones(2)}, prefix="draft")
        with pytest.raises(RecordError, match="there is a parameter 'embed.weight' already; give this model's names a"):
            rec.parameters(model)
    kept = read_recorded(tmp_path).ranks[0].parameters
    assert set(kept) == {*dict(model.named_parameters(remove_duplicate=False)), "inv_freq", "draft.wq"}
    assert torch.equal(kept["head.weight"].tensor(), model.embed.weight)


def test_ranks_of_two_runs_are_never_mixed(tmp_path):
    for folder in ("first", "second"):
        for rank in range(2):
            with record(tmp_path / folder, rank=rank, world_size=2):
                pass
    shutil.rmtree(tmp_path / "first/rank1")
    shutil.copytree(tmp_path / "second/rank1", tmp_path / "first/rank1")
    with pytest.raises(RecordingError, match="two runs are mixed: rank0 says '.*', rank1 '.*'"):
        read_recorded(tmp_path / "first")


def test_what_is_refused(tmp_path):
    model = Toy()
    with record(tmp_path / "run", rank=0, world_size=2) as rec:
        with pytest.raises(RecordError, match="this thread records already"):
            record(tmp_path / "other", rank=0, world_size=1)
        rec.watch(model)
        with pytest.raises(RecordError, match="there is a module '' already; give this model's names a prefix"):
            rec.watch(Toy())
        with pytest.raises(RecordError, match="a torch.nn.Module, not function"):
            rec.watch(lambda x: x)
        for name in ("\x1b[2J", "x" * 1001):
            with pytest.raises(RecordError, match="cannot be a name: printable characters only, at most 1000"):
                rec.tensor(name, IDS)
        with pytest.raises(RecordError, match="positions must be whole numbers, not torch.float32"):
            rec.inputs(IDS, IDS.float())
        other = []
        thread = threading.Thread(target=lambda: other.append(record(tmp_path / "run", rank=1, world_size=2)))
        thread.start()
        thread.join()
        other[0].__exit__()
    with pytest.raises(RecordError, match="holds rank 0 of an earlier run; record into a new folder"):
        record(tmp_path / "run", rank=0, world_size=2)
    with pytest.raises(RecordError, match="there is no rank 2 of 2"):
        record(tmp_path / "new", rank=2, world_size=2)
    with record(tmp_path / "new", rank=1, world_size=2):
        pass
    assert [rank and rank.calls for rank in read_recorded(tmp_path / "new").ranks] == [None, ()]


def test_equal_bytes_are_kept_once_and_many_tensors_take_several_files(tmp_path):
    """Not where the dtype or the length is another, nor where a buffer was written to in between."""
    buffer, weights = torch.zeros(40), torch.randn(3, 100)

    def run(rec):
        for at in range(700):
            rec.tensor(f"layers.{at}.copy", weights.clone())
            rec.tensor(f"layers.{at}.another", torch.full((3,), at))
        for dtype in (torch.int32, torch.float32, torch.int32):
            rec.tensor(str(dtype), torch.zeros(40, dtype=dtype))
        for _ in range(2):
            rec.tensor("buffer", buffer)
            buffer[20:21] += 1  # its first and last bytes stay as they are
        rec.tensor("short", torch.zeros(20))
    call, = recorded(tmp_path, run)
    files = sorted((tmp_path / "rank0").glob("call0*.safetensors"))
    assert len(files) > 1 and sum(len(load_file(file)) for file in files) <= 700 + 4 + len(files)
    assert [entry.tensor()[0].item() for entry in call.entries[1:1400:2]] == list(range(700))
    assert all(torch.equal(entry.tensor(), weights) for entry in call.entries[0:1400:100])
    assert [(e.dtype, len(e.tensor()), e.tensor().sum().item()) for e in call.entries[1400:]] == [
        (torch.int32, 40, 0), (torch.float32, 40, 0), (torch.int32, 40, 0), (torch.float32, 40, 0),
        (torch.float32, 40, 1), (torch.float32, 20, 0)]
