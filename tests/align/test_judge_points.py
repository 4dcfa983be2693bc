"""``judge`` itself on recordings made by hand: which floor, which rows, which evidence, which frame."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.reports import config_with

from tplab.align import judge as judging
from tplab.align.guilty import LocalDiff
from tplab.align.recording import Recording, Shard

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CKPT = Some(name="hand", config=config_with(num_layers=3))
TEXTS = [[5, 6, 7], [8, 9]]
PLACES = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
NAMES = ("embed", "layers.0.q", "layers.0.output", "layers.1.q", "layers.1.mlp", "layers.2.output", "norm", "logits")


def judged(monkeypatch, off=None, *, dtype=F32, places=PLACES, keys=(3, 3, 3, 2, 2), guilty=(), rounding=0.0,
           shards=lambda name, tensor: [Shard(tensor, "replicated"), None], **options):
    """A run in which everything is ones, but for what ``off`` adds: {point: difference}."""
    asked = []

    class Reference:
        def __init__(self, recording, ckpt, dtype):
            self.more = rounding if dtype is F32 and recording.dtype is not F32 else 0.0
            asked.append(dtype)

        def rows(self, name):
            return slice(None)

        def pop(self, name):
            columns = torch.arange(1.0, 5) if name == "layers.0.q" else torch.ones(4)
            return (columns * (1 - self.more)).to(F64).repeat(len(places), 1)

    def judge(recording, ckpt, plan):
        asked.append("local")
        return Some(diff=lambda name: LocalDiff(name, 1.0, 0, 0.1, (0,) if name in guilty else ()))
    monkeypatch.setattr(judging, "_Reference", Reference)
    monkeypatch.setattr(judging, "Judge", judge)
    tensors = {name: (torch.arange(1.0, 5) if name == "layers.0.q" else torch.ones(4)).to(F64).repeat(len(places), 1)
               + (off or {}).get(name, 0.0) for name in NAMES}
    recording = Recording(2, TEXTS, list(places), list(keys), list(places),
                          {name: shards(name, tensor) for name, tensor in tensors.items()}, dtype)
    report = judging.judge(recording, CKPT, None, **options)
    return report, asked


@pytest.mark.parametrize("places, keys, plain", [
    (PLACES, (3, 3, 3, 2, 2), True), (PLACES, (3, 3, 3, 1, 2), False), (PLACES, (1, 2, 3, 2, 2), False),
    (PLACES[1:], (3, 3, 2, 2), False), (PLACES[:3], (3, 3, 3), False)])
def test_the_floor_of_the_decode_path_counts_where_rows_were_not_computed_all_at_once(monkeypatch, places, keys, plain):
    report, _ = judged(monkeypatch, {"norm": 1e-6}, dtype=F64, places=places, keys=keys)
    assert report.ok is not plain, "beyond a plain float64 run's floor, inside the decode path's"
    assert report.computed == (None if plain else [[p for s, p in places if s == n] for n in (0, 1)])


def test_evidence_is_kept_of_the_first_broken_layer_and_of_the_ends(monkeypatch):
    def kept(*wrong):
        return set(judged(monkeypatch, dict.fromkeys(wrong, 1.0))[0].evidence)
    ends = {"embed", "norm", "logits"}
    assert kept("layers.1.q", "layers.2.output") == ends | {"layers.1.q", "layers.1.mlp"}
    assert kept("layers.1.mlp") == ends | {"layers.1.q", "layers.1.mlp"}, "what stands before it in its layer, too"
    assert kept("layers.0.output", "logits") == ends | {"layers.0.q", "layers.0.output"}
    assert kept() == ends | {"layers.2.output"}
    assert kept("embed") == ends | {"layers.2.output"}, "the ends are no layer"


def test_a_healthy_runs_recording_is_let_go_unless_it_is_a_check(monkeypatch):
    assert judged(monkeypatch)[0].recording is None and judged(monkeypatch, by_local=True)[0].recording is not None
    report, asked = judged(monkeypatch, {"norm": 1.0})
    assert report.recording is not None and asked == [F32], "the local frame is looked at when it is asked for"


def test_in_bfloat16_every_point_is_judged_by_its_own_inputs(monkeypatch):
    report, asked = judged(monkeypatch, {"layers.1.q": 0.3}, dtype=BF16, rounding=0.1)
    assert asked == ["local", BF16, F32] and report.ok, "four times what Hugging Face's own rounding left there"
    report, _ = judged(monkeypatch, {"layers.1.q": 0.3}, dtype=BF16, rounding=0.1, guilty=["layers.1.q"])
    assert report.first_divergence.name == "layers.1.q" and report.guilty == ["layers.1.q"]
    for rounding, inside in ((0.1, True), (0.05, False)):
        report, _ = judged(monkeypatch, {"layers.1.q": 0.3}, dtype=BF16, rounding=rounding, guilty=["embed"])
        assert report["layers.1.q"].inside is inside, "behind a guilty one: four times Hugging Face's own rounding"
    assert judged(monkeypatch, {"layers.1.q": 1e-3}, guilty=["layers.1.q"], by_local=True)[1] == ["local", F32]


def test_a_point_that_is_off_behind_a_guilty_one_is_outside(monkeypatch):
    report, _ = judged(monkeypatch, {"norm": 0.5}, by_local=True, guilty=["layers.0.q"])
    assert [p.name for p in report.points if not p.inside] == ["layers.0.q", "norm"]
    assert {"layers.0.q", "layers.0.output"} <= set(report.evidence), "of the layer that is broken by its own inputs"
    report, _ = judged(monkeypatch, {"norm": 0.5}, by_local=True)
    assert all(p.inside for p in report.points), "behind nothing that is guilty it is rounding that has grown"


def test_of_ranks_that_are_missing_nothing_is_compared(monkeypatch):
    def shards(name, tensor):
        if name != "layers.0.q":
            return [Shard(tensor, "replicated"), None]
        tensor = torch.arange(1.0, 5).repeat(5, 1)
        tensor[:, 3] += 0.5  # the last one of rank 0's heads
        return [Shard(tensor[:, [1, 3]], "q_heads", (1, 3)), None]
    report, _ = judged(monkeypatch, shards=shards)
    assert report["layers.0.q"].max_abs == 0.5 and report["layers.0.q"].shape == (5, 2)
    assert report.evidence["layers.0.q"].reference[0].tolist() == [2, 4]
