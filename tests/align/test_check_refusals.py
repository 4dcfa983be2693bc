"""What the check refuses, in one table: what is wrong, where, and which input would work. And its command."""

import json
import shutil

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.recorded import record_lab
from helpers.third_party import HfLike, VllmLike
from helpers.third_party_runs import TEXTS, batch_calls, flat_calls, run

from tplab.align import check
from tplab.align.recording import PlacementError
from tplab.checkpoint import open_checkpoint
from tplab.cli import main
from tplab.faults import fault
from tplab.patch import Patch
from tplab.ranks import RankError
from tplab.record import RecordError, record


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", layers=2, heads=6, kv_heads=2,
                                           head_dim=6, hidden=24))


@pytest.fixture(scope="module")
def healthy(ckpt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "run"
    run(folder, ckpt, VllmLike, flat_calls([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6]], 1))
    return folder


def said(*calls):
    """A recording in which ``rec.inputs`` was told this, and a tensor was recorded in each call."""
    def made(folder, ckpt):
        with record(folder, rank=0, world_size=1) as rec:
            for call in calls:
                rec.inputs(*call)
                rec.tensor("layers.0.input_norm", torch.randn(torch.tensor(call[0]).numel(), 24))
    return made


def silent(folder, ckpt):
    with record(folder, rank=0, world_size=1) as rec:
        rec.tensor("layers.0.input_norm", torch.randn(3, 24))


def longer(folder, ckpt):
    run(folder, ckpt, VllmLike, flat_calls([[1, 2, 3]]), said=lambda rec, *_: rec.inputs([1, 2, 3, 4]))


def wider(folder, ckpt):
    other = make_checkpoint(folder.parent / "wide", "llama", layers=2, heads=6, kv_heads=2, hidden=36)
    run(folder, open_checkpoint(other), VllmLike, flat_calls(TEXTS))


def deeper(folder, ckpt):
    other = make_checkpoint(folder.parent / "deep", "llama", layers=3, heads=6, kv_heads=2, head_dim=6, hidden=24)
    run(folder, open_checkpoint(other), VllmLike, flat_calls(TEXTS))


TWO_TEXTS = ([1, 2, 3, 4], [0, 1, 0, 1])
REFUSED = {
    "no ids": (silent, "call 0 has no token ids: rec.inputs"),
    "ids of another call": (longer, "call 0 has 4 token ids, but its tensors have 3 rows; give rec.inputs"),
    "another width": (wider, "embed_tokens gives 36 columns, but the checkpoint's hidden size is 24"),
    "another depth": (deeper, "has a layer 2, but the checkpoint's layers are 0 to 1"),
    "another vocabulary": (said(([5, 67],)), "token id 67 is not in the checkpoint's vocabulary: 0 to 66"),
    "padding alone": (said(([-1, -1],)), "every token is padding"),
    "no token": (said(([], [])), "no recorded call has a token"),
    "positions of another shape": (said(([1, 2, 3], [0, 1])), r"positions of shape \[2\] for ids of shape \[3\]; give"),
    "too few sequences": (said(([[1, 2, 3], [4, 5, 6]], None, [1])), "1 sequence numbers for 2 lines of 3 tok"),
    "whose token": (said(TWO_TEXTS, ([5], [2])), "do not say to which text they belong; give rec.inputs.*sequences"),
    "a text that ends otherwise": (said(([1, 2], [0, 1], [4, 4], {4: [1, 3]})), "does not end with the call's tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_recording_that_cannot_be_judged(ckpt, tmp_path, name):
    made, words = REFUSED[name]
    made(tmp_path / "run", ckpt)
    with pytest.raises(PlacementError, match=words):
        check(tmp_path / "run", ckpt)


@pytest.mark.parametrize("names, words", [
    ([1], r"names must be a dictionary {pattern: point}, not \[1\]"),
    ({"a": 1}, "names must hold texts {pattern: point}, not {'a': 1}"),
    ({"model.layers.{i}.mlp": "mlp_out"}, "there is no point 'mlp_out'; did you mean 'mlp_act'."),
    ({"model.layers.*.mlp": "mlp"}, "mlp is a point of each layer, so 'model.layers.[*].mlp' must hold {i} once"),
    ({"model.{i}.norm": "norm"}, "norm is no layer’s, so 'model.{i}.norm' must hold {i} nowhere"),
    ({"model.layers.{i}.mpl": "mlp"}, "'model.layers.{i}.mpl' fits nothing that was recorded; the nearest name is "),
])
def test_names_that_cannot_be(ckpt, healthy, names, words):
    with pytest.raises(PlacementError, match=words.replace("{i}", r"\{i\}")):
        check(healthy, ckpt, names=names)


def test_a_layout_that_cannot_be(ckpt, healthy):
    with pytest.raises(PlacementError, match="there is no layout 'turns'; layouts are pairs .*, groups "):
        check(healthy, ckpt, layout=["turns"])


@pytest.mark.parametrize("texts, sequences, words", [
    ({0: [1, 2]}, None, "give sequences too"), ({0: ["a"]}, [0, 0], "must be whole numbers"),
    ({0: [1.5]}, [0, 0], "must be whole numbers")])
def test_texts_that_cannot_be(tmp_path, texts, sequences, words):
    with record(tmp_path / "run", rank=0, world_size=1) as rec, pytest.raises(RecordError, match=words):
        rec.inputs([1, 2], [0, 1], sequences, texts)


def test_names_given_by_hand(ckpt, tmp_path):
    """An engine whose names say nothing is judged by those that the user gives."""
    def watch(rec, model):
        rec.watch(model.embed_tokens, "embed_tokens")
        for i, layer in enumerate(model.layers):
            for name, module in ("a", layer.input_layernorm), ("m", layer.mlp), ("w", layer.self_attn.qkv_proj):
                rec.watch(module, f"stack.{i}.{name}")

    record_lab(tmp_path / "run", ckpt, TEXTS, watch=watch)
    names = {"stack.{i}.a": "input_norm", "stack.{i}.m": "layers.{i}.mlp", "stack.{i}.w": "qkv", "stack.*": ""}
    report = check(tmp_path / "run", ckpt, names=names)
    assert report.verdict == "clean" and {"layers.1.input_norm", "layers.1.mlp", "layers.0.v"} <= set(report.local)
    wrong = check(tmp_path / "run", ckpt, names=names | {"stack.{i}.m": "o_proj"})
    assert wrong.verdict != "clean" and "layers.0.o_proj" in wrong.local, "what is told is believed, and judged"


def test_the_command(ckpt, healthy, tmp_path, capsys):
    bad = record_lab(tmp_path / "bad", ckpt, TEXTS, patches=[fault("shard_dim1")])
    model = str(ckpt.folder)
    assert main(["check", str(healthy), "--model", model]) == 0
    assert "\nclean: " in capsys.readouterr().out
    assert main(["check", str(bad), "--model", model, "--json", str(tmp_path / "r.json")]) == 1
    out = capsys.readouterr().out
    assert "shard_dim1" in out and "layers.0.q " in out and "guilty" in out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["verdict"] == "bug" and written["diagnoses"][0]["fault"] == "shard_dim1"
    assert written["local"][0] | {"name": "embed", "says": ""} == written["local"][0]
    cut = shutil.copytree(healthy, tmp_path / "cut")
    for rank in range(2):
        journal = cut / f"rank{rank}" / "manifest.jsonl"
        journal.write_text("".join(journal.read_text().splitlines(True)[:-1]))
    assert main(["check", str(cut), "--model", model]) == 2
    assert "open: ranks 0–1, call 1: cut off" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, words", [
    (["nowhere", "--model", "fable"], "nowhere is not a folder"),
    (["run", "--model", "no/such/model/here"], ""),
    (["run", "--model", "fable", "--name", "lonely"], "--name takes PATTERN=POINT"),
    (["run", "--model", "fable", "--json", "no/such/folder/r.json"], "no/such/folder/r.json cannot be written"),
])
def test_bad_arguments_are_explained(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert main(["check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_another_checkpoint_of_the_same_sizes(ckpt, healthy, tmp_path):
    other = make_checkpoint(tmp_path / "m", "llama", layers=2, heads=6, kv_heads=2, head_dim=6, hidden=24, seed=5)
    report = check(healthy, other)
    assert report.verdict == "cannot tell" and not report.diagnoses
    assert report.open_questions[0].startswith("no weight is ")


def test_an_engine_that_raises_an_error_is_not_clean(ckpt, tmp_path):
    def forward(self, x):
        raise ValueError("no such thing")

    with pytest.raises(RankError):
        record_lab(tmp_path / "run", ckpt, TEXTS, patches=[Patch("tplab.model.mlp.TensorParallelMLP.forward", forward)])
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "bug" and not report.ok and not report.guilty
    assert "stopped: ranks 0–1, call 0: failed: ValueError: no such thing, in layers.0.mlp" in report.summary()


def test_ranks_that_were_given_other_tokens(ckpt, tmp_path):
    calls = batch_calls([[1, 2, 3], [4, 5, 6]])
    run(tmp_path / "run", ckpt, HfLike, calls, said=lambda rec, ids, positions, numbers: rec.inputs(
        ids.flip(0) if "rank1" in str(rec._folder) else ids, positions, numbers))
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "bug" and report.diagnoses[0].fault == "inputs_differ", report.summary()
    assert "rank 1 was given other token ids than rank 0" in report.recording.contradictions[0]


# Weights.

def weights_of(ckpt, tmp_path, change=lambda model, weights: None, **options):
    run(tmp_path / "run", ckpt, VllmLike, flat_calls(TEXTS), parameters=True, change=change, **options)
    return check(tmp_path / "run", ckpt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_weights_are_the_checkpoints(ckpt, tmp_path, dtype):
    report = weights_of(ckpt, tmp_path, dtype=dtype)
    assert report.verdict == "clean" and not report.parameters, report.summary()
    assert {"model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight",
            "model.embed_tokens.weight"} <= set(report.recording.parameters[1])


def test_recorded_weights_that_are_not(ckpt, tmp_path):
    def change(model, weights):
        model.model.layers[1].self_attn.o_proj.weight.data[3] += 1e-3
        model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(
            model.model.layers[0].mlp.down_proj.weight[:-1], False)

    calls = flat_calls(TEXTS)
    with pytest.raises(RankError):  # the engine cannot run with them
        run(tmp_path / "run", ckpt, VllmLike, calls, parameters=True, change=change)
    report = check(tmp_path / "run", ckpt)
    name = "model.layers.{}".format
    assert set(report.parameters) == {f"rank {r}: {name(x)}" for r in (0, 1) for x in (
        "1.self_attn.o_proj.weight", "0.mlp.down_proj.weight")}
    assert "shape [23, 22], not [24, 22]" in report.parameters[f"rank 0: {name('0.mlp.down_proj.weight')}"]
    assert report.verdict == "bug"
