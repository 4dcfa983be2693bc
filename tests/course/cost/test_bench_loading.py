"""What is measured beside a race: loading, the memory's speed; and the random checkpoints that a race can be about."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers.pools import Threads

from course.cost import loading, memory, shapes
from tplab.checkpoint import open_checkpoint
from tplab.checkpoint.layout import expected_shapes


class Pool(Threads):
    """Ranks that answer what they are told to."""

    def run(self, fn, *given):
        return [{"bytes_read": 44e6 / self.size, "private": 88e6 / (rank + self.size), "seconds": 0.5}
                for rank in range(self.size)]


@pytest.mark.parametrize("tp, layout", [(1, [(1, 0)]), (2, [(1, 0), (2, 0), (2, 1)])])
def test_loading_is_compared_with_one_rank(tp, layout, monkeypatch):
    monkeypatch.setattr(loading, "RankPool", Pool)
    lines, ckpt = [], open_checkpoint("fable")
    total = sum(tensor.nbytes for tensor in _tensors(ckpt).values())
    rows = loading.bench_load(ckpt, "fable", tp, "float32", lines.append)["rows"]
    assert [(row["ranks"], row["rank"]) for row in rows] == layout
    assert [row["read_share"] for row in rows] == [44e6 / size / total for size, _ in layout]
    assert [row["private_share"] for row in rows] == [1 / (rank + size) for size, rank in layout]
    assert lines[0] == f"load, fable, float32, checkpoint of {total / 1e6:.0f} MB" and len(lines) == 2 + len(rows)
    assert lines[2].split() == ["rank", "0", "of", "1", "44", "MB", f"{44e6 / total:.3f}", "88", "MB", "1.00", "0.50"]


def test_a_checkpoint_has_the_bytes_of_its_own_dtype(monkeypatch):
    monkeypatch.setattr(loading, "RankPool", Pool)
    ckpt = SimpleNamespace(config=open_checkpoint("fable").config, tensors={
        "a": SimpleNamespace(shape=(300, 400), dtype=torch.bfloat16),
        "b": SimpleNamespace(shape=(4,), dtype=torch.float32)})
    rows = loading.bench_load(ckpt, "m", 1, "float32", lambda line: None)["rows"]
    assert [row["read_share"] for row in rows] == [44e6 / (300 * 400 * 2 + 4 * 4)]


def test_private_memory_is_what_it_grew_by_while_the_model_was_loaded(monkeypatch):
    log = []
    process = SimpleNamespace(memory_full_info=lambda: SimpleNamespace(uss=log.append("uss") or 100 * len(log)))
    monkeypatch.setattr("psutil.Process", lambda: process)
    monkeypatch.setattr(loading, "all_reduce", lambda tensor: log.append("meet"))
    monkeypatch.setattr(loading, "state", {})
    monkeypatch.setattr(loading.time, "perf_counter", iter([1.0, 4.0]).__next__)
    model = SimpleNamespace(load_stats=SimpleNamespace(bytes_read=7))
    monkeypatch.setattr(loading, "load_model", lambda ckpt, plan, dtype: log.append(dtype) or model)
    assert loading.measure_load("ckpt", "plan", "bfloat16") == {"bytes_read": 7, "private": 400 - 200, "seconds": 3.0}
    assert log == ["meet", "uss", torch.bfloat16, "uss"] and loading.state == {"loaded": model}, "it is held meanwhile"


def _tensors(ckpt):
    with ckpt.reader() as reader:
        return {name: reader[name][:] for name in ckpt.tensors}


def test_bandwidth_is_what_all_ranks_read_in_their_median_pass(monkeypatch):
    assert memory.bandwidth(SimpleNamespace(run=lambda fn, size: [size, 2.0]), 8) == 10
    took = iter([9.0, 1.0, 4.0, 2.0, 3.0, 8.0] * 2)
    clock = iter([moment for seconds in took for moment in (100.0, 100.0 + seconds)])
    kept, met, read = {}, [], []
    monkeypatch.setattr(memory, "state", kept)
    monkeypatch.setattr(memory, "barrier", lambda: met.append(len(read) // 2))
    monkeypatch.setattr(memory.time, "perf_counter", lambda: read.append(next(clock)) or read[-1])
    assert memory._stream(64) == 64 / 4 and kept["stream"].nbytes == 64
    data = kept["stream"]
    assert memory._stream(64) == 16 and kept["stream"] is data and met == [0, 6], "all begin at the same time"
    summed, clock = [], iter(range(100))
    kept["stream"] = SimpleNamespace(sum=lambda: summed.append(len(read) % 2))
    assert memory._stream(64) == 64 and summed == [1] * 6, "between the two looks at the clock"


@pytest.mark.parametrize("name, parameters", [
    ("qwen2.5-0.5b", 494_032_768), ("mistral-7b", 7_248_023_552), ("llama-3.1-70b", 70_553_706_496)])
def test_a_shape_has_as_many_parameters_as_its_model(name, parameters):
    theta = 5e5 if name.startswith("llama") else 1e6
    assert shapes.SHAPES[name]["rope_parameters"] == {"rope_type": "default", "rope_theta": theta}
    assert sum(map(math.prod, expected_shapes(shapes.shape_config(name), ()).values())) == parameters


def test_a_random_checkpoint_opens_and_goes(monkeypatch):
    shape = {**shapes.RANDOM_MODELS["random-qwen2.5-0.5b"], "hidden_size": 16, "intermediate_size": 8,
             "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    monkeypatch.setitem(shapes.RANDOM_MODELS, "small", shape)
    with shapes.random_checkpoint("small") as folder:
        weights = _tensors(open_checkpoint(folder))
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
        for name, weight in weights.items():
            std, mean = torch.std_mean(weight.float())
            assert abs(mean - int(name.endswith("norm.weight"))) < 0.02 and 0 < std < 0.1
    assert not folder.exists()
