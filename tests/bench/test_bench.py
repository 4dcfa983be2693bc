"""The benchmark command: all contestants run, the table says what it must."""

import json

import pytest
from helpers.checkpoints import make_checkpoint

from tplab.bench import BenchError, bench, run
from tplab.bench.peers import Work
from tplab.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("bench") / "m", "qwen2", layers=1, tie=True)


def test_decode_against_both_peers(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "PAUSE", 0)
    monkeypatch.setattr(run, "STREAMED", 1 << 16)
    monkeypatch.setitem(run.WORKS, "decode", lambda vocab, longest: Work([[1, 2, 3]], [4]))
    assert main(["bench", "decode", "--model", str(folder), "--json", str(tmp_path / "table.json")]) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["name"] for row in table["rows"]] == [
        "tplab, 2 ranks", "HF generate, 2 threads", "HF tensor parallel, 2 ranks", "limit: weights once from memory"]
    assert table["rows"][0]["ratio"] == 1 and all(row["low"] <= row["median"] <= row["high"] for row in table["rows"])
    printed = capsys.readouterr().out
    assert "5 rounds" in printed and all(row["name"] in printed for row in table["rows"])


def test_loading_counts_what_each_rank_reads(folder):
    lines = []
    table = bench("load", str(folder), 2, show=lines.append)
    whole, first, second = table["rows"]
    assert whole["read_share"] == 1 and 0.4 < first["read_share"] < 0.7
    assert len(lines) == 2 + 3 and all(row["seconds"] > 0 for row in table["rows"])


def test_what_is_no_benchmark(folder):
    with pytest.raises(BenchError, match="decode, prefill, batch, load"):
        bench("speed", str(folder))
    with pytest.raises(BenchError, match="at least 5 rounds"):
        bench("decode", str(folder), rounds=4)
