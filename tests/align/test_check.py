"""`check`: a folder that the recorder wrote, judged. The lab's own engine is recorded like any other."""

import dataclasses
import json
import shutil

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.recorded import record_lab

from tplab import show
from tplab.align import CheckReport, align, check, diagnose
from tplab.align.check.weights import wrong_parameters
from tplab.align.guilty import local_diffs
from tplab.align.judge import judge
from tplab.align.recording import Contradiction, Parameter, Shard
from tplab.checkpoint import open_checkpoint
from tplab.cli import main
from tplab.errors import TplabError
from tplab.faults import fault
from tplab.patch import Patch
from tplab.ranks import RankError


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


def with_attention(rec, model):
    """The modules, and what no module of the lab's engine computes: q and k after RoPE, attention's output."""
    rec.watch(model)
    for number, layer in enumerate(model.layers):
        at, name = layer.self_attn, f"layers.{number}.self_attn."

        def rotate(q, k, cos, sin, right=at.apply_rope, name=name):
            q, k = right(q, k, cos, sin)
            rec.tensor(name + "q_rope", q), rec.tensor(name + "k_rope", k)
            return q, k

        def attend(q, k, v, context, right=at.attend_all, name=name):
            out = right(q, k, v, context)
            rec.tensor(name + "attn", out)
            return out
        at.apply_rope, at.attend_all = rotate, attend


@pytest.mark.parametrize("watch", [lambda rec, model: rec.watch(model), with_attention])
@pytest.mark.parametrize("name", ["nan_mask", "qkv_order"])
def test_what_stands_between_the_projections_is_named(ckpt, tmp_path, name, watch):
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), patches=[fault(name)], watch=watch), ckpt)
    assert [one.fault for one in report.diagnoses] == [name], report.summary()


def test_two_bugs_are_both_named_and_the_rest_inherits(ckpt, tmp_path):
    broken = [fault("kv_first_rows"), fault("head_random")]
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), patches=broken), ckpt)
    assert [one.fault for one in report.diagnoses][:1] == ["kv_first_rows"]
    assert report.diagnoses[-1].names[0] == "head_random", report.summary()
    assert report.says("layers.0.k") == "guilty (rank 1)" and report.says("norm") == "inherits"
    assert report.diagnoses[0].where == "layers 0–1: k, v on rank 1"


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


def test_weights_in_another_dtype_than_the_run(ckpt, tmp_path):
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), tp=1), ckpt)
    name = "model.layers.1.input_layernorm.weight"
    with ckpt.reader() as reader:
        right = reader[name][:].float()
    for held, good in ((right, True), (right.bfloat16(), True), (right.bfloat16().float(), True), (right.half(), True),
                       (right.double(), True), (right.half().float(), False), (right + 1e-6, False)):
        recording = dataclasses.replace(report.recording, dtype=torch.bfloat16, parameters=[{name: Parameter(held)}])
        assert (wrong_parameters(recording, ckpt) == {}) is good


def test_far_off_without_a_guilty_module_is_no_clean_run(ckpt, tmp_path):
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67)), ckpt)
    for floors, verdict in ((5, "clean"), (20, "cannot tell")):
        last = dataclasses.replace(report.points[-1], relative=floors * report.points[-1].floor)
        far = dataclasses.replace(report, points=[*report.points[:-1], last])
        far.local = report.local
        assert far.verdict == verdict and ("but every module is right" in far.summary()) == (floors == 20)


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
    report = check(folder, other)
    assert report.verdict == "cannot tell" and not report.diagnoses, "the same sizes, other weights"
    assert report.open_questions[0].startswith("no weight is ")
    with pytest.raises(TplabError):
        check(folder, open_checkpoint(make_checkpoint(tmp_path / "n", "llama", hidden=40, layers=1)))


def test_an_engine_that_raises_an_error_is_not_clean(ckpt, tmp_path):
    def forward(self, x):
        raise ValueError("no such thing")

    with pytest.raises(RankError):
        record_lab(tmp_path / "run", ckpt, prompts(67), patches=[
            Patch("tplab.model.mlp.TensorParallelMLP.forward", forward)])
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "bug" and not report.ok and not report.guilty
    assert "stopped: ranks 0–1, call 0: failed: ValueError: no such thing, in layers.0.mlp" in report.summary()


def test_a_contradiction_is_a_diagnosis_of_its_own(ckpt, tmp_path):
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67)), ckpt)
    report.recording.contradictions.append(Contradiction("query heads 4–5 are on no rank"))
    assert report.verdict == "bug" and diagnose(report) == report.diagnoses[0]
    assert report.diagnoses[0].sentence == "Query heads 4–5 are on no rank."


def test_the_function_is_not_hidden_by_its_folder():
    import tplab.align.check.folder  # noqa: F401
    from tplab.align import check as imported

    assert imported is check and callable(check)


def test_whole_logits_may_be_computed_here_or_gathered(ckpt, tmp_path):
    """Ranks that differ before the head: a gathered row is made from all of them, and the head is not to blame."""
    report = align(ckpt, prompts(67), patches=[fault("all_reduce_missing")], logical=True)
    recording = report.recording
    parts = [shard.tensor for shard in recording.points["logits"]]
    gathered = [Shard(torch.cat(parts, 1), "vocab", range(67))] * 2
    with ckpt.reader() as reader:
        head = reader["lm_head.weight"][:]
    alone = [Shard(shard.tensor @ head.T, "vocab", range(67)) for shard in recording.points["norm"]]
    for logits in (gathered, alone):
        changed = dataclasses.replace(recording, points=recording.points | {"logits": logits})
        assert local_diffs(changed, ckpt, report.plan)["logits"].inside
    flipped = [dataclasses.replace(shard, tensor=shard.tensor.roll(1, 1)) for shard in gathered]
    changed = dataclasses.replace(recording, points=recording.points | {"logits": flipped})
    assert local_diffs(changed, ckpt, report.plan)["logits"].guilty == (0, 1)


def test_the_figures_take_what_was_recorded_of_an_engine(ckpt, tmp_path):
    """Without logits, with a bug that is in no number."""
    whole = check(record_lab(tmp_path / "run", ckpt, prompts(67), patches=[fault("shard_dim1")]), ckpt)
    some = {name: shards for name, shards in whole.recording.points.items() if name != "logits"}
    plan = whole.plan
    for change in ({"points": some}, {"contradictions": [
            Contradiction("query heads 4–5 are on no rank")]}):
        report = judge(dataclasses.replace(whole.recording, **change), ckpt, plan, by_local=True, kind=CheckReport)
        assert "leaves the floor" in show.points_figure(report).alt_text or "layers.0" in show.describe(report)
        report.to_json(tmp_path / "r.json")
        assert "shard_dim1" in str(report) and len(report.table()) == len(report.points)
    healthy = check(record_lab(tmp_path / "good", ckpt, prompts(67)), ckpt)
    healthy.recording.contradictions.append(Contradiction("query heads 4–5 are on no rank"))
    assert "inside the float32 floor" in show.describe(healthy) and show.diff_figure({"mine": healthy})


PARTS = {  # what was watched: (how, the ends that a figure can have)
    "all": (lambda rec, model: rec.watch(model), ["embed", "0", "1", "norm", "logits"]),
    "a layer": (lambda rec, model: rec.watch(model.layers[1], "layers.1"), ["0", "1"]),
    "the head": (lambda rec, model: rec.watch(model.lm_head, "lm_head"), ["norm", "logits"]),
    "a projection": (lambda rec, model: rec.watch(model.layers[0].self_attn.qkv_proj, "layers.0.attn.qkv_proj"), []),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_few_modules_alone_are_judged_and_drawn(ckpt, tmp_path, part):
    watch, ends = PARTS[part]
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), patches=[fault("vocab_offset")], watch=watch), ckpt)
    assert report.verdict == "bug", report.summary()
    if part != "all":
        said = str(report)
        assert "Nothing before it was recorded." in said and "(not recorded)" in said and "Everything" not in said
    if ends:
        figure = show.diff_figure({"mine": report})
        assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ends
        assert figure.axes[0].get_ylabel().startswith("largest |engine − HF|")
    else:
        with pytest.raises(TplabError, match="no layer's output and no end of the model was recorded"):
            show.diff_figure({"mine": report})
    if part != "the head":
        assert ": engine: " in show.points_figure(report).alt_text.replace(". engine", ": engine")
    else:
        with pytest.raises(TplabError, match="points of none"):
            show.points_figure(report)


def test_norms_that_have_each_others_weights_are_known_by_their_order(ckpt, tmp_path):
    """In an engine whose names say nothing."""
    def watch(rec, model):
        rec.watch(model.embed_tokens, "embed_tokens")
        for i, layer in enumerate(model.layers):
            first, second = layer.input_layernorm, layer.post_attention_layernorm
            first.weight, second.weight = second.weight, first.weight
            for name, module in (("a", first), ("b", second), ("self_attn", layer.self_attn), ("mlp", layer.mlp)):
                rec.watch(module, f"layers.{i}.{name}")

    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), watch=watch), ckpt)
    assert [one.fault for one in report.diagnoses] == ["norm_weight_exchanged"], report.summary()
    assert report.diagnoses[0].where == "layers 0–1: input_norm, post_norm"
