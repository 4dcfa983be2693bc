"""`check`: a folder that the recorder wrote, judged. The lab's own engine is recorded like a stranger's."""

import dataclasses
import json
import shutil

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.recorded import record_lab

from tplab.align import check
from tplab.align.check.parameters import wrong_parameters
from tplab.align.recording import Parameter
from tplab.checkpoint import open_checkpoint
from tplab.cli import main
from tplab.errors import TplabError
from tplab.faults import fault


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("check") / "m", "qwen2", heads=6, kv_heads=3,
                                           hidden=48, rope="yarn"))


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_healthy_engine_is_clean(ckpt, tmp_path, dtype, tp):
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), tp, dtype, parameters=True), ckpt)
    assert report.verdict == "clean" and report.ok and not report.diagnoses, report.summary()
    assert report.dtype is dtype and not report.parameters
    assert {"embed", "layers.0.q", "layers.1.k", "layers.1.output", "logits"} <= report.local.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["shard_dim1", "kv_first_rows", "head_random", "vocab_offset"])
def test_a_bug_is_named(ckpt, tmp_path, name, dtype):
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), dtype=dtype, patches=[fault(name)]), ckpt)
    assert report.verdict == "bug" and name in report.diagnoses[0].names, report.summary()


def test_two_bugs_are_both_named_and_the_rest_inherits(ckpt, tmp_path):
    broken = [fault("kv_first_rows"), fault("head_random")]
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), patches=broken), ckpt)
    assert [one.fault for one in report.diagnoses][:1] == ["kv_first_rows"]
    assert report.diagnoses[-1].names[0] == "head_random", report.summary()
    assert report.says("layers.0.k") == "guilty (rank 1)" and report.says("norm") == "inherits"
    assert report.diagnoses[0].where == "layers 0–1: k, v"


def test_weights_are_judged_without_running_anything(ckpt, tmp_path):
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67)), ckpt)
    name = "model.layers.1.mlp.gate_proj.weight"
    with ckpt.reader() as reader:
        right = reader[name][:]
    nearly = right[22:].clone()
    nearly[3, 2] += 1e-4
    held = [{name: Parameter(right[:22], 0, range(22))}, {name: Parameter(right[22:], 0, range(22, 43))}]
    recording = dataclasses.replace(report.recording, parameters=held)
    assert wrong_parameters(recording, ckpt) == {}
    for wrong, says in ((nearly, "% of its numbers are not"), (right[20:], r"shape [23, 48], not [21, 48]")):
        held[1][name] = Parameter(wrong, 0, range(22, 43))
        found = wrong_parameters(recording, ckpt)
        assert list(found) == [f"rank 1: {name}"] and says in found[f"rank 1: {name}"]
    assert dataclasses.replace(report, parameters=found).verdict == "bug"


def test_a_missing_rank_is_said(ckpt, tmp_path):
    folder = record_lab(tmp_path / "run", ckpt, prompts(67))
    shutil.rmtree(folder / "rank1")
    report = check(folder, ckpt)
    assert report.verdict == "cannot tell" and "rank 1 recorded nothing" in report.summary()


def test_the_command(ckpt, tmp_path, capsys):
    good = record_lab(tmp_path / "good", ckpt, prompts(67))
    bad = record_lab(tmp_path / "bad", ckpt, prompts(67), patches=[fault("shard_dim1")])
    model = str(ckpt.folder)
    assert main(["check", str(good), "--model", model]) == 0
    assert "\nclean: " in capsys.readouterr().out
    assert main(["check", str(bad), "--model", model, "--json", str(tmp_path / "r.json")]) == 1
    out = capsys.readouterr().out
    assert "shard_dim1" in out and "layers.0.q " in out and "guilty" in out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["verdict"] == "bug" and written["diagnoses"][0]["fault"] == "shard_dim1"
    assert written["local"][0] | {"name": "embed", "says": ""} == written["local"][0]
    shutil.rmtree(good / "rank1")
    assert main(["check", str(good), "--model", model]) == 2
    assert "open: rank 1 recorded nothing" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, says", [
    (["nowhere", "--model", "fable"], "nowhere is not a folder"),
    (["run", "--model", "no/such/model/here"], ""),
    (["run", "--model", "fable", "--name", "lonely"], "--name takes PATTERN=POINT"),
    (["run", "--model", "fable", "--json", "no/such/folder/r.json"], "there is no folder"),
])
def test_bad_input_is_explained(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert main(["check", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_another_checkpoint(ckpt, tmp_path):
    folder = record_lab(tmp_path / "run", ckpt, prompts(67))
    other = make_checkpoint(tmp_path / "m", "qwen2", heads=6, kv_heads=3, hidden=48, rope="yarn", seed=5)
    assert check(folder, other).verdict == "bug", "the same sizes, other weights"
    with pytest.raises(TplabError):
        check(folder, open_checkpoint(make_checkpoint(tmp_path / "n", "llama", hidden=40, layers=1)))
