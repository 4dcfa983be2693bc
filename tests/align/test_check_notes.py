"""What a check says besides its verdict: each thing once, however many ranks, calls and layers say it."""

from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.recorded import record_lab
from helpers.reports import config_with

from tplab.align import check
from tplab.align.check.expected import Expected
from tplab.align.check.notes import call_notes, once
from tplab.checkpoint import open_checkpoint
from tplab.patch import Patch
from tplab.ranks import RankError


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("notes") / "m", "llama"))


@pytest.mark.parametrize("said, lines", [
    ([], []),
    ([(0, 0, "x")], ["rank 0, call 0: x"]),
    ([(0, 0, "x"), (0, 1, "x"), (1, 0, "x"), (1, 1, "x")], ["ranks 0–1, calls 0–1: x"]),
    ([(0, 0, "x"), (0, 0, "x"), (1, 2, "y"), (1, 0, "x")], ["ranks 0–1, call 0: x", "rank 1, call 2: y"]),
    ([(0, 0, "x"), (0, 1, "x"), (1, 1, "x")], ["rank 0, calls 0–1: x", "rank 1, call 1: x"]),
])
def test_a_sentence_is_said_once(said, lines):
    assert once(said) == lines


def rank(number, raised=(), status="done", left_out=()):
    return SimpleNamespace(rank=number, calls=[SimpleNamespace(index=0, raised=raised, status=status,
                                                               left_out=left_out)])


SIZE = "RuntimeError: The size of tensor a: 4"


@pytest.mark.parametrize("raised, status, notes", [
    (["a.0.rotary: E: x", "a.0: E: x", "a: E: x", ": E: x"], "done", ["a.0.rotary: E: x"]),
    (["a.0.rotary: E: x", ": E: x"], "failed: E: x", []),
    (["a.0.rotary: E: x", ": E: x"], "failed: E: y", ["a.0.rotary: E: x"]),
    ([": E: x"], "done", ["the model: E: x"]),
    ([f"layers.{i}.rotary: {SIZE}" for i in range(5)], "done", [f"layers.{{i}}.rotary: {SIZE} (layers 0–4)"]),
    (["b.rotary: E: x", "layers.1.b: E: x", "layers.1.b: E: y"], "done",
     ["b.rotary, layers.1.b: E: x", "layers.1.b: E: y"]),
    (["layers.10.b: E: x", "layers.1: E: x"], "done", ["layers.{i}.b, layers.{i}: E: x (layers 1, 10)"]),
    (["layers.1.b: E: x", "layers.1: E: x", "layers.1.b: E: x"], "done", ["layers.1.b: E: x"]),
])
def test_an_error_that_was_swallowed_is_said_once_and_where_it_began(raised, status, notes):
    assert call_notes([rank(0, raised, status), rank(1, raised, status)]) == [f"ranks 0–1, call 0: {x}" for x in notes]


def test_what_was_left_out_is_said(ckpt, tmp_path):
    assert call_notes([rank(0, left_out=("calls=: this call",)), rank(1)]) == ["rank 0, call 0: calls=: this call"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cos_and_sin_are_known_by_their_numbers(ckpt, tmp_path, dtype):
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), dtype=dtype), ckpt)
    assert report.recording.notes == [
        "cos and sin of the rotation, which are no points by themselves: layers.{i}’s input 1 (layers 0–1); "
        "layers.{i}’s input 2 (layers 0–1); layers.{i}.self_attn’s input 1 (layers 0–1); layers.{i}.self_attn’s "
        "input 2 (layers 0–1)"]
    assert len(report.recording.unplaced) == 1 and "mlp.act’s output" in report.recording.unplaced[0]


@pytest.mark.parametrize("rows, wide, off, known", [
    (range(3), 6, 0, True), (range(3), 3, 0, True), (range(3), 12, 0, False), (range(3), 6, 2 ** -8, True),
    (range(3), 6, 2 ** -6, False), ([0], 6, 0, False), ([4, 4], 6, 0, False)])  # at one position it could be anything
def test_tables_are_hugging_faces_at_the_recorded_positions(ckpt, rows, wide, off, known):
    frequencies = 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    expected = Expected(ckpt, SimpleNamespace(places=[(0, row) for row in rows], complete=lambda source: [1, 2],
                                              rows=lambda *_: held))
    expected.config = config_with(head_dim=6)
    expected._rotary = lambda x, positions, parts: [
        table(positions[:, None] * frequencies.repeat(2)[None])[None] for table in (torch.cos, torch.sin)]
    for table in (torch.cos, torch.sin):
        held = table(torch.tensor(list(rows))[:, None] * frequencies.repeat(4)[None, :wide]) + off
        assert expected.are_tables(SimpleNamespace(name="model.thing", path="0")) is known
        assert expected.are_tables(SimpleNamespace(name="model.rotary_emb", path="0")), "by its name"
        assert expected.are_tables(SimpleNamespace(name="model.thing", path="position_embeddings.1"))


def test_a_failure_stands_once_in_a_report(ckpt, tmp_path):
    def forward(self, x):
        raise ValueError("no such thing")

    with pytest.raises(RankError):
        record_lab(tmp_path / "run", ckpt, prompts(67), patches=[
            Patch("tplab.model.mlp.TensorParallelMLP.forward", forward)])
    assert check(tmp_path / "run", ckpt).summary().count("no such thing") == 1


def test_a_call_without_an_end_is_an_open_question(ckpt, tmp_path):
    folder = record_lab(tmp_path / "run", ckpt, prompts(67))
    for journal in folder.glob("*/manifest.jsonl"):
        journal.write_bytes(b"\n".join(journal.read_bytes().split(b"\n")[:-2]) + b"\n")
    report = check(folder, ckpt)
    assert report.verdict == "cannot tell" and report.open_questions == ["ranks 0–1, call 0: cut off, in lm_head"]
