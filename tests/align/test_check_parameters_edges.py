"""Recorded weights, Hugging Face's values for a few rows, and the report's words: on tensors made by hand."""

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace as Some

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.recorded import record_lab

from tplab.align import check
from tplab.align.check import evidence
from tplab.align.check import weights as parameters
from tplab.align.check.evidence import Evidence, Reference
from tplab.align.check.sources import SAMPLE
from tplab.align.check.verdict import CheckReport
from tplab.align.diagnose.case import Diagnosis
from tplab.align.guilty import LocalDiff
from tplab.align.recording import Parameter
from tplab.align.report import AlignReport, PointDiff
from tplab.checkpoint import open_checkpoint
from tplab.checkpoint.layout import EMBEDDING, HEAD

F32, BF16 = torch.float32, torch.bfloat16
THIRDS = torch.arange(12.0).reshape(4, 3) / 3


# Recorded weights.

@pytest.fixture
def judged(monkeypatch):
    def of(*ranks, dtype=F32, tensors=None):
        file = {"w": THIRDS, EMBEDDING: THIRDS + 1} | (tensors or {})
        monkeypatch.setattr(parameters, "Weights", lambda ckpt, run, dtype: Some(
            parts=file, raw=lambda name: file[name].to(run)))
        return parameters.wrong_parameters(Some(parameters=list(ranks), dtype=dtype), None)
    return of


@pytest.mark.parametrize("held, what", [
    (Parameter(THIRDS), None), (Parameter(THIRDS[1:3], 0, (1, 2)), None),
    (Parameter(THIRDS[:, [2, 0]], 1, (2, 0)), None),
    (Parameter(THIRDS[[3, 1]], 0, (1, 3)), "100% of its numbers are not the checkpoint's"),
    (Parameter(THIRDS + torch.tensor([0, 0, 1e-6])), "33% of its numbers are not the checkpoint's"),
    (Parameter(THIRDS[:, :2], 0, range(4)), "shape [4, 2], not [4, 3]"),
    (Parameter(THIRDS[:3], 0, (0, 1)), "shape [3, 3], not [2, 3]"), (Parameter(THIRDS.T), "shape [3, 4], not [4, 3]")])
def test_a_weight_is_the_checkpoints_bit_for_bit(judged, held, what):
    assert judged({"w": held}) == ({"rank 0: w": what} if what else {})
    assert judged(None, {}, {"w": held}) == ({"rank 2: w": what} if what else {}), "others recorded none"


def test_every_rank_and_tensor_is_named(judged):
    wrong = Parameter(THIRDS * 2)
    assert list(judged({"w": wrong, EMBEDDING: wrong}, {"w": Parameter(THIRDS)}, {"w": wrong})) == [
        "rank 0: w", f"rank 0: {EMBEDDING}", "rank 2: w"]


@pytest.mark.parametrize("dtype, held, right", [
    (BF16, THIRDS.to(BF16), True), (BF16, THIRDS, True),  # as the file has it, in a bfloat16 engine
    (BF16, THIRDS.to(BF16).float(), True),  # rounded before
    (BF16, THIRDS.to(torch.float16), True), (F32, THIRDS.to(BF16), True), (F32, THIRDS.to(BF16).float(), False),
    (BF16, THIRDS.to(torch.float16).float(), False)])
def test_a_weight_may_stand_in_another_dtype(judged, dtype, held, right):
    assert bool(judged({"w": Parameter(held)}, dtype=dtype)) is not right


def test_a_tied_head_is_the_embedding_and_an_own_one_is_not(judged):
    assert not judged({HEAD: Parameter(THIRDS + 1)}) and judged({HEAD: Parameter(THIRDS)})
    assert judged({HEAD: Parameter(THIRDS + 1)}, tensors={HEAD: THIRDS})


# What the checkpoint and Hugging Face give for a few rows.

@pytest.fixture
def weights(monkeypatch):
    found, reads = object.__new__(Evidence), []
    file = {name: torch.full((2, 2), float(i), dtype=torch.float64) for i, name in enumerate(
        ("model.layers.0.a", "model.layers.0.b", "model.layers.1.a", EMBEDDING, HEAD))}
    vars(found).update(ckpt=Some(reader=nullcontext), config=Some(tie_word_embeddings=False, head_dim=2), _kept={},
                       _parts={name: name for name in file})
    monkeypatch.setattr(evidence, "read_part", lambda name, reader: reads.append(name) or file[name])
    return found, reads


def test_weights_of_one_layer_are_kept_at_a_time(weights):
    found, reads = weights
    for name in ("0.a", "0.b", "0.a", "1.a", "0.a"):
        assert found.weight(f"model.layers.{name}").dtype is F32
    assert [name[-3:] for name in reads] == ["0.a", "0.b", "1.a", "0.a"]
    assert found.weight("model.layers.7.c") is None


@pytest.mark.parametrize("tied, number", [(True, 3), (False, 4)])
def test_the_head_is_the_embedding_where_it_is_tied(weights, tied, number):
    weights[0].config.tie_word_embeddings = tied
    assert weights[0].logits(torch.ones(1, 2, dtype=BF16)).tolist() == [[2.0 * number] * 2]


def test_products_are_made_in_float32_whatever_was_recorded(monkeypatch):
    found, table = object.__new__(Evidence), {"m.weight": THIRDS, "m.bias": torch.arange(4.0) / 7}
    monkeypatch.setattr(Evidence, "weight", lambda self, name: table.get(name))
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=BF16)
    assert torch.equal(found.product("m", x), x.float() @ THIRDS.T + torch.arange(4.0) / 7)
    del table["m.bias"]
    assert torch.equal(found.product("m", x), x.float() @ THIRDS.T)
    table["model.layers.2.mlp.down_proj.weight"] = THIRDS
    assert torch.equal(found.summand(2, "down", x[:, :2], [2, 0]), x[:, :2].float() @ THIRDS[:, [2, 0]].T)


class Traced(Reference):
    """Hugging Face's trace gives each token's position, plus a hundred times its first token."""

    def __init__(self, monkeypatch, ids, places):
        monkeypatch.setattr(evidence, "hf_model", lambda ckpt, dtype: dtype)
        monkeypatch.setattr(evidence, "hf_trace", self.trace)
        self.asked = []
        super().__init__(Some(config=Some(head_dim=2)), Some(places=places, texts=Some(ids=ids)))

    def trace(self, model, ids):
        assert model is F32
        self.asked.append(list(ids))
        rows = (torch.arange(len(ids)) + 100.0 * ids[0])[:, None]
        return {"embed": rows, "logits": rows} | dict.fromkeys(("layers.0.attn", "layers.0.o_proj"), rows.expand(-1, 6))


def test_hugging_faces_values_stand_at_the_recorded_rows(monkeypatch):
    found = Traced(monkeypatch, [[1, 5, 5, 5], [2, 5, 5], [3]], [(0, 1), (0, 2), (1, 0), (2, 0)])
    assert found.point("embed").flatten().tolist() == [101, 102, 200, 300]
    assert found.asked == [[1, 5, 5], [2], [3]], "no further than the rows go"
    assert found.point("layers.0.attn").shape == (4, 3, 2) and found.point("layers.0.o_proj").shape == (4, 6)
    assert found.point("layers.0.q") is None and len(found.asked) == 3, "asked once"


def test_only_the_sampled_rows_are_asked_for(monkeypatch):
    found = Traced(monkeypatch, [[1] * 40, [2] * 40], [(s, p) for s in (0, 1) for p in range(10)])
    assert len(found.point("embed")) == SAMPLE and [len(ids) for ids in found.asked] == [10, SAMPLE - 10]


def test_hugging_faces_logits_at_any_places(monkeypatch):
    found = Traced(monkeypatch, [[1, 5, 5, 5], [2, 5, 5]], [])
    assert found.logits([(1, 1), (0, 0), (0, 2)]).flatten().tolist() == [201, 100, 102]
    assert sorted(found.asked) == [[1, 5, 5], [2, 5]]


# What a check says.

def point(name, relative=0.0, inside=True, nan=0):
    return PointDiff(name, "replicated", (2, 4), relative, relative, relative, nan, 0, 8, 0.0, inside, 2e-5)


NAMES = ("embed", "layers.0.q", "layers.0.output", "layers.1.q", "layers.1.attn", "layers.1.output", "norm")


def report(guilty=(), off=(), dtype=F32, diagnoses=(), local=None, names=NAMES, **more):
    recording = Some(contradictions=[], points={name: ["a", "b"] for name in names}, places=[(0, 0), (0, 1)],
                     world_size=more.pop("world_size", 2), notes=more.pop("notes", []), assumed={},
                     unplaced=more.pop("unplaced", []))
    found = CheckReport("hand", None, dtype, [[1, 2]], [point(name, 0.5 * (name in off), name not in off) for name in
                                                        names], {}, recording=recording, folder="run", **more)
    found.local = {name: LocalDiff(name, 0.25 * (name in guilty), 1, 2e-5, (0, 1) * (name in guilty)) for name in names}
    found.diagnoses = list(diagnoses)
    return found


def test_a_clean_check_in_words():
    assert report().summary() == ("run as hand: 2 ranks, float32, 2 rows, 7 points without logits\n"
                                  "clean: every module makes of its own inputs what Hugging Face's would")
    one = report(world_size=1, names=(*NAMES, "logits"), dtype=BF16, notes=["n"], unplaced=["x: why"]).summary()
    assert one.splitlines()[0] == "run as hand: 1 rank, bfloat16, 2 rows, 8 points"
    assert one.splitlines()[2:] == ["note: n", "note: not placed: x: why"]
    assert "points without embed and logits\n" in report(names=NAMES[1:]).summary()


def test_a_bug_in_words():
    bugs = [Diagnosis("rope_pairs", "Pairs.", points=("layers.1.q",)),
            Diagnosis(None, "Unknown.", points=("layers.1.attn",))]
    said = report(["layers.1.q", "layers.1.attn"], ["layers.1.q", "layers.1.attn", "norm"], diagnoses=bugs,
                  parameters={"rank 0: w": "differs"}, stopped=("rank 1, call 0: failed",),
                  broken_off=("rank 3",)).summary().splitlines()
    assert said[1:] == ["not clean: 2 guilty points, 1 more inherits an error", "1. layer 1: q: rope_pairs. Pairs.",
                        "2. layer 1: attn: no name. Unknown.", "weights: rank 0: w: differs",
                        "stopped: rank 1, call 0: failed", "open: rank 3"]
    said = report(["layers.1.q"], ["layers.1.q", "norm", "layers.1.output"]).summary().splitlines()
    assert said[1] == "not clean: 1 guilty point, 2 more inherit an error"


def test_numbers_that_are_lost_are_counted_at_all_points():
    found = report()
    found.points = [point("embed", nan=2), point("norm", nan=1), point("layers.0.q")]
    found.plan = Some(tensor_parallel_size=2, kind="partition", rows=list)
    assert found.nan_count == AlignReport.to_dict(found)["nan_count"] == 3


def test_lookalikes_in_words():
    found = report(diagnoses=[Diagnosis("a", "S.", lookalikes=("b", "c"), points=("embed",))])
    assert found.diagnosis_lines() == ["1. embed: a (or b, c). S."]


def test_the_table_for_the_terminal_shows_all_of_the_first_guilty_layer():
    def shown(*guilty, off=()):
        return [line.split() for line in report(guilty, off).point_lines().splitlines()[1:]]
    ends = ["embed", "layers.0.output", "layers.1.output", "norm"]
    assert [line[0] for line in shown()] == ends
    lines = shown("layers.1.attn", off=["layers.1.attn", "norm", "layers.0.q"])
    assert [line[0] for line in lines] == ["embed", "layers.0.output", "layers.1.q", "layers.1.attn",
                                           "layers.1.output", "norm"]
    assert lines[3] == ["layers.1.attn", "5.0e-01", "2.5e-01", "0", "guilty"] and lines[5][-1] == "inherits"
    assert [line[0] for line in shown("norm")] == ends, "the ends of the model belong to no layer"


# The door.

def test_every_call_of_every_rank_is_asked_how_it_ended(monkeypatch):
    door, told = import_module("tplab.align.check.check"), {}

    def call(index, status, last=""):
        return Some(index=index, status=status, last=last)
    ranks = [Some(rank=0, calls=[call(0, "done"), call(1, "done"), call(2, "failed: E: x", "mlp")]), None,
             Some(rank=2, calls=[call(0, "done"), call(1, "cut off", "norm"), call(2, "failed: E: x", "mlp")])]
    monkeypatch.setattr(door, "read_recorded", lambda folder: Some(world_size=3, ranks=ranks))
    monkeypatch.setattr(door, "ShardPlan", Some(from_config=lambda config, size: size))
    monkeypatch.setattr(door, "place", lambda recorded, ckpt, names: names)
    monkeypatch.setattr(door, "wrong_parameters", lambda recording, ckpt: {})
    monkeypatch.setattr(door, "open_checkpoint", lambda model: Some(config=None))
    monkeypatch.setattr(door, "judge", lambda *given, **more: told.update(more, given=given))
    door.check("run", "m", names={"a": "norm"})
    assert told["broken_off"] == ("rank 1 recorded nothing", "rank 2, call 1: cut off, in norm")
    assert told["stopped"] == ("ranks 0, 2, call 2: failed: E: x, in mlp",)
    assert told["given"][0] == {"a": "norm"} and told["given"][2] == 3 and told["by_local"] is True

def test_what_a_person_says_of_names_reaches_the_placing(tmp_path):
    """The embedding is said to be the last norm, which it is not."""
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", "llama"))
    folder = record_lab(tmp_path / "run", ckpt, [[1, 2, 3]], tp=1)
    assert check(folder, ckpt).verdict == check(folder, str(tmp_path / "m"), names={}).verdict == "clean"
    report = check(folder, ckpt, names={"embed_tokens": "norm", "norm": "", "lm_head:in": ""})
    assert report.guilty[0] == "norm" and report.recording.assumed["norm"].startswith("from embed_tokens")
