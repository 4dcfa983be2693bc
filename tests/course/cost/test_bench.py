"""The benchmark command: all contestants run, the table says what it must."""

import json
import math

import pytest
from helpers.checkpoints import make_checkpoint

from course.cost import BenchError, bench, run
from course.cost.peers import Timing, Work
from tplab.checkpoint import open_checkpoint
from tplab.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("bench") / "m", "qwen2", layers=1, tie=True)


@pytest.mark.pool
def test_decode_against_both_peers(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "PAUSE", 0)
    monkeypatch.setattr(run, "STREAMED", 1 << 16)
    monkeypatch.setitem(run.WORKS, "decode", lambda vocab, longest: Work([[1, 2, 3]], [4]))
    assert main(["bench", "decode", "--model", str(folder), "--json", str(tmp_path / "table.json")]) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["name"] for row in table["rows"]] == [
        "tplab, 2 ranks", "tplab, 1 rank of 2 threads", "HF generate, 2 threads", "HF tensor parallel, 2 ranks",
        "limit: weights once from memory"]
    assert [row.get("equal") for row in table["rows"]] == [1, 1, 1, 1, None], "in float32 all write the same"
    assert table["rows"][0]["ratio"] == 1 and all(row["low"] <= row["median"] <= row["high"] for row in table["rows"])
    printed = capsys.readouterr().out
    assert "5 rounds" in printed and all(row["name"] in printed for row in table["rows"])


@pytest.mark.pool
def test_loading_counts_what_each_rank_reads(folder):
    lines = []
    table = bench("load", str(folder), 2, show=lines.append)
    whole, first, second = table["rows"]
    assert whole["read_share"] == 1 and 0.4 < first["read_share"] < 0.7
    assert [row["private_share"] for row in table["rows"]] == [
        row["private"] / whole["private"] for row in table["rows"]]
    assert len(lines) == 2 + 3 and all(row["seconds"] > 0 for row in table["rows"])


def test_each_benchmark_counts_what_it_is_about():
    work, timing = Work([[1] * 30, [2] * 10], [4, 7]), Timing(first=2.0, total=10.0)
    assert work.useful_tokens == 11
    assert run._value("decode", work, timing) == 10 / 8, "the first token belongs to the prompt"
    assert run._value("prefill", work, timing) == 40 / 2
    assert run._value("batch", work, timing) == run._value("prefix", work, timing) == 11 / 10
    assert run._value("long", work, timing) == (40 + 11) / 10


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    values = {"ours": [10.0, 40.0, 30.0], "theirs": [5.0, 20.0, 10.0]}
    each = dict.fromkeys(values, 1.0)
    race = run.Race(values, [20.0, 20.0, 20.0], each, each, each, {})
    table = run._table("decode", "m", 2, "float32", race, False, lambda line: None)
    assert [(row["name"], row["ratio"]) for row in table["rows"]] == [
        ("ours", 1), ("theirs", 2), ("limit: weights once from memory", 1.5)]
    assert [(row["median"], row["low"], row["high"]) for row in table["rows"]][1] == (10, 5, 20), "whose ratio is 3"


@pytest.mark.parametrize("tie", [True, False])
def test_the_limit_reads_every_weight_once_and_an_embedding_only_as_the_head(tmp_path, tie, monkeypatch):
    monkeypatch.setattr(run, "RankPool", lambda *args, **options: None)
    monkeypatch.setattr(run, "bandwidth", lambda pool, size: 1e6)
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", "qwen2", tie=tie))
    stored = sum(math.prod(info.shape) for info in ckpt.tensors.values())
    aside = 0 if tie else math.prod(ckpt.tensors["model.embed_tokens.weight"].shape)
    assert run.Limit(ckpt, 2, "bfloat16").measure() == 1e6 / (2 * (stored - aside))


def test_what_is_no_benchmark(folder):
    with pytest.raises(BenchError, match="decode, prefill, batch, prefix, long, load, curves"):
        bench("speed", str(folder))
    with pytest.raises(BenchError, match="at least 5 rounds"):
        bench("decode", str(folder), rounds=4)
    with pytest.raises(BenchError, match="load has no peers"):
        bench("load", str(folder), busy=True)
    for wrong in ("nowhere/python", str(folder / "config.json")):
        with pytest.raises(BenchError, match=f"{wrong!r} cannot be run"):
            bench("decode", str(folder), vllm=wrong)
