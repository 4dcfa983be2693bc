"""The parts of a benchmark with stand-ins for the contestants: what is measured, in which order, and what is shown."""

from types import SimpleNamespace

import pytest
import torch

from tplab.bench import loading, memory, peers, run, shapes
from tplab.bench.peers import Timing, Work
from tplab.checkpoint import open_checkpoint
from tplab.ranks import RankError

CKPT = SimpleNamespace(config=SimpleNamespace(vocab_size=100, max_position_embeddings=300), folder="folder")


def test_the_works_are_the_same_every_time_and_fit_the_model():
    decode, prefill, batch = (run.WORKS[kind](100, 300) for kind in ("decode", "prefill", "batch"))
    assert [(list(map(len, work.prompts)), work.new_tokens) for work in (decode, prefill)] == [([32], [64]),
                                                                                              ([298], [2])]
    assert list(map(len, run.WORKS["prefill"](100, 9000).prompts)) == [512]
    assert len(batch.prompts) == len(batch.new_tokens) == 16 and batch == run.WORKS["batch"](100, 300)
    assert len(set(map(len, batch.prompts))) > 2 and len(set(batch.new_tokens)) > 2
    assert len({tuple(prompt[:8]) for prompt in batch.prompts}) == 16, "equal beginnings would be cached"
    assert {token for work in (decode, prefill, batch) for prompt in work.prompts for token in prompt} == set(
        range(10, 100))


class Contestant:
    """What a race needs: a name, a time for a piece of work, an end."""

    log = []
    broken = ()

    def __init__(self, ckpt, tp, dtype):
        self.name = type(self).__name__
        self.log.append(("make", self.name, tp, dtype))

    def time(self, work):
        self.log.append(self.name)
        if self.name in self.broken:
            raise RankError(f"{self.name} cannot")
        return Timing(1.0, 2.0)

    def close(self):
        self.log.append(("close", self.name))


class Reading(Contestant):
    """The limit."""

    def measure(self):
        self.log.append("limit")
        return 7.0


@pytest.fixture
def race(monkeypatch):
    """A race of stand-ins; returns the values, the limits, who is absent, and what happened in which order."""
    log = []
    monkeypatch.setattr(Contestant, "log", log)
    for name in ("Tplab", "HuggingFace", "HuggingFaceTP"):
        monkeypatch.setattr(run, name, type(name, (Contestant,), {}))
    monkeypatch.setattr(run, "Limit", Reading)
    monkeypatch.setattr(run.time, "sleep", log.append)

    def run_it(kind, tp=2, broken=()):
        monkeypatch.setattr(Contestant, "broken", broken)
        return *run._race(kind, CKPT, tp, 5, "float64"), log

    return run_it


def test_contestants_take_turns_at_being_the_first(race):
    values, limits, absent, log = race("decode")
    assert values == dict.fromkeys(("Tplab", "HuggingFace", "HuggingFaceTP"), [63.0] * 5)
    assert (limits, absent) == ([7.0] * 5, {})
    warm = [step for name in values for step in (("make", name, 2, "float64"), name)]
    assert log[:7] == [*warm, ("make", "Reading", 2, "float64")]
    a, b, c = values
    rounds = [step for first in ([a, b, c], [b, c, a], [c, a, b], [a, b, c], [b, c, a]) for step in [*first, "limit"]]
    assert log[7:-4] == [step for one in rounds for step in (run.PAUSE, one)], "a pause before each"
    assert log[-4:] == [("close", name) for name in ("Reading", "HuggingFaceTP", "HuggingFace", "Tplab")]


@pytest.mark.parametrize("kind, tp", [("prefill", 1), ("batch", 2)])
def test_who_has_no_part_in_a_race(kind, tp, race):
    values, limits, absent, log = race(kind, tp)
    assert list(values) == ["Tplab", "HuggingFace"] and limits == [] and absent == {} and "limit" not in log
    assert ("make", "HuggingFaceTP", tp, "float64") not in log


def test_a_peer_that_cannot_run_is_absent_with_its_reason_and_ends(race):
    values, _, absent, log = race("prefill", broken=("HuggingFaceTP",))
    assert list(values) == ["Tplab", "HuggingFace"] and absent == {"HF tensor parallel": "HuggingFaceTP cannot"}
    assert ("close", "HuggingFaceTP") in log
    with pytest.raises(RankError, match="Tplab cannot"):
        race("prefill", broken=("Tplab",))
    assert log[-1] == ("close", "Tplab")


def test_the_table_as_it_is_shown():
    lines = []
    table = run._table("prefill", "m", 1, "bfloat16", {"ours": [4.0, 2.0]}, [], {"HF tensor parallel": "no"},
                       lines.append)
    assert lines == [
        "prefill, m, bfloat16, 1 rank, 2 rounds", f"{'':32}   prompt tokens/s            spread    tplab is",
        f"{'ours':32}               3.0        2.0 to 4.0      1.00 ×", "HF tensor parallel: not possible here: no"]
    assert table == {"benchmark": "prefill", "model": "m", "tp": 1, "dtype": "bfloat16", "unit": "prompt tokens/s",
                     "rows": [{"name": "ours", "median": 3.0, "low": 2.0, "high": 4.0, "ratio": 1.0}],
                     "absent": {"HF tensor parallel": "no"}}


class Pool:
    """Ranks that answer what they are told to."""

    def __init__(self, size, timeout=None):
        self.size = size

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def run(self, fn, *given):
        return [{"bytes_read": 4e6 / self.size, "private": 8e6 / (rank + self.size), "seconds": 0.5}
                for rank in range(self.size)] if fn is loading.measure_load else [fn, *given]


@pytest.mark.parametrize("tp, layout", [(1, [(1, 0)]), (2, [(1, 0), (2, 0), (2, 1)])])
def test_loading_is_compared_with_one_rank(tp, layout, monkeypatch):
    monkeypatch.setattr(loading, "RankPool", Pool)
    lines, ckpt = [], open_checkpoint("fable")
    total = sum(tensor.nbytes for tensor in _tensors(ckpt).values())
    rows = loading.bench_load(ckpt, "fable", tp, "float32", lines.append)["rows"]
    assert [(row["ranks"], row["rank"]) for row in rows] == layout
    assert [row["read_share"] for row in rows] == [4e6 / size / total for size, _ in layout]
    assert [row["private_share"] for row in rows] == [1 / (rank + size) for size, rank in layout]
    assert lines[0] == f"load, fable, float32, checkpoint of {total / 1e6:.0f} MB" and len(lines) == 2 + len(rows)
    assert lines[2].split()[:7] == ["rank", "0", "of", "1", "4", "MB", f"{4e6 / total:.3f}"]


def _tensors(ckpt):
    with ckpt.reader() as reader:
        return {name: reader[name][:] for name in ckpt.tensors}


def test_bandwidth_is_what_all_ranks_read_in_their_median_pass(monkeypatch):
    assert memory.bandwidth(SimpleNamespace(run=lambda fn, size: [size, 2.0]), 8) == 10
    took = iter([9.0, 1.0, 4.0, 2.0, 3.0, 8.0] * 2)
    clock = iter([moment for seconds in took for moment in (100.0, 100.0 + seconds)])
    kept = {}
    monkeypatch.setattr(memory, "state", kept)
    monkeypatch.setattr(memory, "barrier", lambda: None)
    monkeypatch.setattr(memory.time, "perf_counter", lambda: next(clock))
    assert memory._stream(64) == 64 / 4 and kept["stream"].nbytes == 64
    data = kept["stream"]
    assert memory._stream(64) == 16 and kept["stream"] is data


def test_a_random_checkpoint_opens_and_goes(monkeypatch):
    shape = {**shapes.RANDOM_MODELS["random-qwen2.5-0.5b"], "hidden_size": 16, "intermediate_size": 8,
             "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    monkeypatch.setitem(shapes.RANDOM_MODELS, "small", shape)
    with shapes.random_checkpoint("small") as folder:
        weights = _tensors(open_checkpoint(folder))
        assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
        for name, weight in weights.items():
            std, mean = torch.std_mean(weight.float())
            assert abs(mean - int(name.endswith("norm.weight"))) < 0.02 and 0 < std < 0.1
    assert not folder.exists()


def test_what_the_engine_is_asked_and_when_it_began_to_answer(monkeypatch):
    made, asked = [], []

    class Engine:
        def __init__(self, *given, **options):
            made.append((given, options))

        def generate(self, prompts, params, use_tqdm):
            asked.append((prompts, [(p.temperature, p.max_tokens, p.ignore_eos) for p in params], use_tqdm))
            return [SimpleNamespace(metrics=SimpleNamespace(time_to_first_token=t)) for t in (0.5, 3.0)]

    monkeypatch.setattr(peers, "LLM", Engine)
    monkeypatch.setattr(peers, "RankPool", Pool)
    monkeypatch.setattr(peers.time, "perf_counter", iter([10.0, 14.0]).__next__)
    ours = peers.Tplab(CKPT, 3, "float64")
    assert ours.time(Work([[1], [2, 3]], [4, 5])) == Timing(3.0, 4.0) and ours.name == "tplab, 3 ranks"
    assert asked == [([[1], [2, 3]], [(0, 4, True), (0, 5, True)], False)]
    assert made == [((CKPT, 3, "float64"), {"pool": ours.pool, "enable_prefix_caching": False})]
    assert [peers.HuggingFace(CKPT, n, "float32").name for n in (1, 2)] == ["HF generate, 1 thread",
                                                                          "HF generate, 2 threads"]
    assert peers.HuggingFace(CKPT, 2, "float32").pool.size == 1 and peers.HuggingFaceTP(CKPT, 2, "x").pool.size == 2


def test_what_hugging_face_is_asked_and_when_it_began_to_answer(monkeypatch):
    asked = []

    def generate(ids, attention_mask, streamer, **options):
        asked.append((ids.tolist(), attention_mask.tolist(), options))
        for value in (ids, 7, 8) if streamer else ():
            streamer.put(value)

    monkeypatch.setitem(peers.state, "hf", SimpleNamespace(generate=generate))
    monkeypatch.setattr(peers.time, "perf_counter", iter([10.0, 11.0, 12.5, 13.0, 14.0, 20.0, 26.0]).__next__)
    assert peers._time_hf(Work([[5, 6]], [3])) == Timing(2.5, 4.0), "the prompt comes first, then the first token"
    assert peers._time_hf(Work([[5, 6], [7]], [3, 9])) == Timing(6.0, 6.0), "it streams no batches"
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert asked == [([[5, 6]], [[1, 1]], {"max_new_tokens": 3, **options}),
                     ([[5, 6], [0, 7]], [[1, 1], [0, 1]], {"max_new_tokens": 9, **options})]
