"""The parts of a benchmark with stand-ins for the contestants: what is measured, in which order, and what is shown."""

from contextlib import ExitStack, nullcontext
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from helpers.pools import Threads

from course.cost import peers, run
from course.cost.peers import Timing, Work
from course.cost.processes import PeerError
from tplab.ranks import RankError

CKPT = SimpleNamespace(config=SimpleNamespace(vocab_size=100, max_position_embeddings=300, num_heads=9),
                       folder="folder")


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
    late = {}  # which time it fails, and how

    pids = ()

    def __init__(self, ckpt, tp, dtype, prefix=False, **options):
        self.name = type(self).__name__ + ("invariant" if "batch_invariant" in options else str(
            options["threads"]) if [*options] == ["threads"] else "")
        self.log.append(("make", self.name, tp, dtype, *([prefix] if prefix else []), *options.values()))

    def time(self, work):
        self.log.append(self.name)
        if self.name in self.broken:
            raise RankError(f"{self.name} cannot")
        turn, error = self.late.get(self.name, (0, None))
        if self.log.count(self.name) == turn:
            raise error
        return Timing(1.0, 2.0, [[7] * (3 if self.name == "HuggingFace" else 4)])

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
    for name in ("Tplab", "HuggingFace", "HuggingFaceTP", "VLLM", "LlamaCpp"):
        monkeypatch.setattr(run, name, type(name, (Contestant,), {}))
    monkeypatch.setattr(run, "Limit", Reading)
    monkeypatch.setattr(run.time, "sleep", log.append)

    def run_it(kind, tp=2, broken=(), vllm=None, llama_cpp=None, late=MappingProxyType({}), busy=False,
               batch_invariant=False):
        log.clear()
        monkeypatch.setattr(Contestant, "broken", broken)
        monkeypatch.setattr(Contestant, "late", late)
        return run._race(kind, CKPT, tp, 5, "float64", vllm, llama_cpp, busy, batch_invariant), log

    return run_it


def test_contestants_take_turns_at_being_the_first(race):
    seen, log = race("decode")
    assert seen.values == dict.fromkeys(("Tplab", "Tplab2", "HuggingFace", "HuggingFaceTP"), [63.0] * 5)
    assert (seen.limits, seen.absent) == ([7.0] * 5, {})
    assert seen.equal == {"Tplab": 1.0, "Tplab2": 1.0, "HuggingFace": 0.75, "HuggingFaceTP": 1.0}
    assert list(seen.ready) == [*seen.values]
    warm = [("make", "Tplab", 2, "float64"), "Tplab", ("make", "Tplab2", 1, "float64", 2), "Tplab2",
            ("make", "HuggingFace", 2, "float64"), "HuggingFace", ("make", "HuggingFaceTP", 2, "float64")]
    assert log[:9] == [*warm, "HuggingFaceTP", ("make", "Reading", 2, "float64")]
    a, b, c, d = seen.values
    rounds = [step for first in ([a, b, c, d], [b, c, d, a], [c, d, a, b], [d, a, b, c], [a, b, c, d])
              for step in [*first, "limit"]]
    assert log[9:-5] == [step for one in rounds for step in (run.PAUSE, one)], "a pause before each"
    assert log[-5:] == [("close", name) for name in ("Reading", "HuggingFaceTP", "HuggingFace", "Tplab2", "Tplab")]


def test_a_contestant_is_ready_when_it_has_loaded_before_it_warms_up(race, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    init, timed = Contestant.__init__, Contestant.time

    def loads(self, *given, **options):
        clock[0] += 2.0
        init(self, *given, **options)

    def works(self, work):
        clock[0] += 100.0
        return timed(self, work)

    monkeypatch.setattr(Contestant, "__init__", loads)
    monkeypatch.setattr(Contestant, "time", works)
    assert set(race("prefill")[0].ready.values()) == {2.0}


def test_hugging_face_loads_in_the_asked_dtype_with_a_thread_for_each_rank(monkeypatch):
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda folder, dtype: SimpleNamespace(
        eval=lambda: (folder, dtype)))
    monkeypatch.setattr(peers, "state", {})
    peers._load_hf("folder", "bfloat16", 3)
    assert peers.state == {"hf": ("folder", torch.bfloat16)} and told == [3]
    assert peers._living(SimpleNamespace(pids=[7, None, 9])) == [7, 9]


@pytest.mark.parametrize("kind, tp", [("prefill", 1), ("batch", 2)])
def test_which_contestants_have_no_part_in_a_race(kind, tp, race):
    seen, log = race(kind, tp)
    assert list(seen.values) == ["Tplab", *["Tplab2"] * (tp > 1), "HuggingFace"] and "limit" not in log
    assert (seen.limits, seen.absent) == ([], {})
    assert ("make", "HuggingFaceTP", tp, "float64") not in log


def test_a_peer_that_fails_in_a_round_takes_nothing_along(race):
    seen, log = race("decode", late={"HuggingFace": (4, PeerError("out of memory"))})  # the first was to warm up
    assert seen.values == dict.fromkeys(("Tplab", "Tplab2", "HuggingFaceTP"), [63.0] * 5)
    assert seen.absent == {"HuggingFace": "round 3: out of memory"} and set(seen.equal) == set(seen.values)
    assert log.count(("close", "HuggingFace")) == 1
    assert log[log.index(("close", "HuggingFace")):].count("Tplab") >= 2, "closed at once, not at the end"


@pytest.mark.parametrize("error", [RankError("lost a rank"), PeerError("lost a rank")], ids=lambda e: type(e).__name__)
def test_nothing_is_compared_with_a_tplab_that_failed(error, race):
    with pytest.raises(type(error), match="lost a rank"):
        race("decode", late={"Tplab": (3, error)})


def test_a_peer_that_cannot_run_is_absent_with_its_reason_and_ends(race, monkeypatch):
    seen, log = race("prefill", broken=("HuggingFaceTP",))
    assert list(seen.values) == ["Tplab", "Tplab2", "HuggingFace"]
    assert seen.absent == {"HF tensor parallel": "HuggingFaceTP cannot"}
    assert log.count(("close", "HuggingFaceTP")) == 1 and log.index(("close", "HuggingFaceTP")) < log.index(run.PAUSE)
    monkeypatch.setattr(run, "HuggingFaceTP", lambda *given: (_ for _ in ()).throw(PeerError("not installed")))
    assert race("prefill")[0].absent == {"HF tensor parallel": "not installed"}
    with pytest.raises(RankError, match="Tplab cannot"):
        race("prefill", broken=("Tplab",))
    assert log[-1] == ("close", "Tplab")


def test_the_others_are_stopped_while_one_loads_or_is_measured(race, monkeypatch):
    told = []
    pids = {"Tplab": [1, 2], "Tplab2": [6], "HuggingFace": [3], "HuggingFaceTP": [4], "VLLM": [5]}
    monkeypatch.setattr(Contestant, "pids", property(lambda self: pids[self.name]))
    monkeypatch.setattr(run, "send", lambda others, number: told.append((list(others), number.name)))
    monkeypatch.setattr(run, "alone", lambda chosen, others: told.append((list(chosen), list(others))) or nullcontext())
    monkeypatch.setattr(run, "private_bytes", len)
    monkeypatch.setattr(run, "VLLM", type("VLLM", (Contestant,), {"__init__": lambda self, *given, **options: setattr(
        self, "name", "VLLM")}))
    seen, _ = race("decode", broken=("HuggingFaceTP",), vllm="python")
    waiting = ([], [1, 2], [1, 2, 6], [1, 2, 6, 3], [1, 2, 6, 3])  # one that cannot run is not among them
    assert told[:10] == [(pids, number) for pids in waiting for number in ("SIGSTOP", "SIGCONT")]
    assert told[10:15] == [([1, 2], [6, 3, 5]), ([6], [1, 2, 3, 5]), ([3], [1, 2, 6, 5]), ([5], [1, 2, 6, 3]),
                           ([], [1, 2, 6, 3, 5])], "last the limit"
    assert len(told) == 10 + 5 * 5 and seen.held == {"Tplab": 2, "Tplab2": 1, "HuggingFace": 1, "VLLM": 1}


def test_a_busy_process_is_there_while_they_race_and_not_while_they_get_ready(race, monkeypatch):
    def busy_process():
        stack = ExitStack()
        stack.callback(log.append, "rest")
        log.append("busy")
        return stack

    log = Contestant.log
    monkeypatch.setattr(run, "busy_process", busy_process)
    monkeypatch.setattr(run, "SETTLED", 0.0)
    race("prefill", busy=True)
    warm_up = log[:log.index("busy")]
    assert warm_up.count("HuggingFace") == 1 and log.count("HuggingFace") == 6 and run.PAUSE not in warm_up
    assert ("close", "Tplab") in log[log.index("rest"):], "until the last round is over"
    race("prefill")
    assert "busy" not in log


def test_beside_a_busy_process_a_contestant_works_a_while_before_it_is_measured(race, monkeypatch):
    clock, works, plain = [0.0], [], run.prefix_work(100, 300)

    def takes(self, work):
        clock[0] += 0.7
        works.append((self.name, work))
        return Timing(1.0, 1.0 if work == plain else 4.0, [[7]])

    monkeypatch.setattr(run, "busy_process", nullcontext)
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Contestant, "time", takes)
    values = race("prefix", busy=True)[0].values
    names = [*values]
    assert works[3:15] == [(name, work) for name in names for work in (plain, plain, plain, plain.shifted(1, 100))], (
        "2.1 seconds, on what was met before, then what counts")
    assert len(works) == 3 + 5 * 3 * 4
    assert values == dict.fromkeys(names, [16 * 16 / 4.0] * 5), "what was done before does not count"
    works.clear()
    race("prefix")
    assert len(works) == 3 + 5 * 3


def test_the_benchmark_passes_on_whether_it_is_busy(monkeypatch):
    monkeypatch.setattr(run, "_race", lambda *given: given)
    monkeypatch.setattr(run, "_table", lambda *given: (given[4][7], given[5]))
    assert run.bench("decode", "fable", busy=True) == (True, True)
    assert run.bench("decode", "fable") == (False, False)


def test_a_terminal_is_told_which_one_is_measured(race, monkeypatch):
    told = []
    monkeypatch.setattr(run, "tqdm", lambda **options: nullcontext(SimpleNamespace(set_description_str=told.append)))
    race("prefill")
    assert told[:3] == ["tplab gets ready", "tplab, 1 rank gets ready", "HF generate gets ready"]
    assert told[4:6] == ["round 1 of 5: Tplab", "round 1 of 5: Tplab2"] and told[-1].startswith("round 5 of 5: ")


def test_vllm_comes_as_threads_and_where_heads_allow_as_ranks(race):
    def made(log):
        return [step for step in log if isinstance(step, tuple) and step[0] == "make"]

    _, log = race("prefix", tp=3, vllm="python")
    assert made(log) == [
        ("make", "Tplab", 3, "float64", True), ("make", "Tplab3", 1, "float64", True, 3),
        ("make", "HuggingFace", 3, "float64"),
        ("make", "VLLM", 1, "float64", True, "python", 3), ("make", "VLLM", 3, "float64", True, "python")]
    _, log = race("batch", tp=2, vllm="python")
    assert [step[2] for step in made(log) if step[1] == "VLLM"] == [1], "9 heads on 2 ranks: it refuses"
    last = made(race("batch", tp=2, llama_cpp="python")[1])[-1]
    assert last == ("make", "LlamaCpp", 2, "float64", run.batch_work(CKPT.config.vocab_size, 100_000), "python")


def test_the_batch_invariant_engine_takes_part_where_it_is_asked_for(race):
    seen, log = race("decode", batch_invariant=True)
    assert [*seen.values] == ["Tplab", "Tplab2", "Tplabinvariant", "HuggingFace", "HuggingFaceTP"]
    assert ("make", "Tplabinvariant", 2, "float64", True) in log


def test_each_round_of_a_prefix_race_is_new_to_every_cache_and_memory_is_the_most_that_was_seen(race, monkeypatch):
    works, held = [], iter([3, 0, 8, 0, 5, 9, 7, 4, 0, 6, 0, 2, 0, 5, 1])
    monkeypatch.setattr(Contestant, "time", lambda self, work: works.append(work.prompts) or Timing(
        1.0, 2.0, [[7]] * 16))
    monkeypatch.setattr(run, "private_bytes", lambda pids: next(held))
    seen, _ = race("prefix")
    assert seen.held == {"Tplab": 9, "Tplab2": 0, "HuggingFace": 8}, "3, 9, 4, 6, 1 and 8, 5, 7, 2, 5: in turns"
    first = works[0][0]
    assert works[::3] == works[1::3] == works[2::3], "all get the same work"
    assert len({tuple(prompts[0]) for prompts in works}) == 6 and works[3][0][0] == 10 + (first[0] - 9) % 90


def test_works_that_share_or_fill_what_a_model_can_read():
    prefix, long = run.WORKS["prefix"](100, 300), run.WORKS["long"](100, 300)
    assert len({tuple(prompt[:150]) for prompt in prefix.prompts}) == 1 and prefix.new_tokens == [16] * 16
    assert len({tuple(prompt[150:]) for prompt in prefix.prompts}) == 16
    assert set(map(len, prefix.prompts)) == {166} and len(run.WORKS["prefix"](100, 9000).prompts[0]) == 272
    assert prefix.prompts[0][:16] != prefix.prompts[0][150:], "what is shared does not come again"
    assert (list(map(len, long.prompts)), long.new_tokens) == ([268], [32])
    assert list(map(len, run.WORKS["long"](100, 9000).prompts)) == [2048]


def test_the_table_as_it_is_shown():
    lines = []
    seen = run.Race({"ours": [4.0, 2.0]}, [], {"ours": 1.25}, {"ours": 3_000_000}, {"ours": 1.0}, {"vLLM": "no"})
    table = run._table("prefill", "m", 1, "bfloat16", seen, True, lines.append)
    assert lines == [
        "prefill, m, bfloat16, 1 rank, 2 rounds, one busy process",
        f"{'':32}     prompt tokens/s            spread  tplab is    ready    memory  same tokens",
        f"{'ours':32}                 3.0      2.0   to 4.0    1.00 ×    1.2 s      3 MB         100%",
        "vLLM: not possible here: no"]
    assert table == {"benchmark": "prefill", "model": "m", "tp": 1, "dtype": "bfloat16", "busy": True,
                     "unit": "prompt tokens/s", "absent": {"vLLM": "no"},
                     "rows": [{"name": "ours", "median": 3.0, "low": 2.0, "high": 4.0, "ratio": 1.0, "ready": 1.25,
                               "bytes": 3_000_000, "equal": 1.0}]}


class Pool(Threads):
    """Ranks that are told to do something."""

    def run(self, fn, *given):
        return [fn, *given]


def test_what_the_engine_is_asked_and_when_it_began_to_answer(monkeypatch):
    made, asked = [], []

    class Engine:
        def __init__(self, *given, **options):
            made.append((given, options))

        def generate(self, prompts, params, use_tqdm):
            asked.append((prompts, [(p.temperature, p.max_tokens, p.ignore_eos) for p in params], use_tqdm))
            return [SimpleNamespace(metrics=SimpleNamespace(time_to_first_token=t), outputs=[SimpleNamespace(
                token_ids=(7,))]) for t in (0.5, 3.0)]

    monkeypatch.setattr(peers, "LLM", Engine)
    monkeypatch.setattr(peers, "RankPool", Pool)
    monkeypatch.setattr(peers.time, "perf_counter", iter([10.0, 14.0]).__next__)
    ours = peers.Tplab(CKPT, 3, "float64")
    assert ours.time(Work([[1], [2, 3]], [4, 5])) == Timing(3.0, 4.0, [[7], [7]]) and ours.name == "tplab, 3 ranks"
    assert asked == [([[1], [2, 3]], [(0, 4, True), (0, 5, True)], False)]
    assert made == [((CKPT, 3, "float64"), {"pool": ours.pool, "enable_prefix_caching": False,
                                              "batch_invariant": False})]
    told = []
    monkeypatch.setattr(Pool, "run", lambda self, *given: told.append((self.size, *given)))
    assert peers.Tplab(CKPT, 1, "float64", threads=3).name == "tplab, 1 rank of 3 threads"
    peers.Tplab(CKPT, 3, "float64")
    assert told == [(1, torch.set_num_threads, 3), (3, torch.set_num_threads, 1)], "not those that a pool deals out"
    assert [peers.HuggingFace(CKPT, n, "float32").name for n in (1, 2)] == ["HF generate, 1 thread",
                                                                          "HF generate, 2 threads"]
    assert peers.HuggingFace(CKPT, 2, "float32").pool.size == 1 and peers.HuggingFaceTP(CKPT, 2, "x").pool.size == 2


def test_what_hugging_face_is_asked_and_when_it_began_to_answer(monkeypatch):
    asked = []

    def generate(ids, attention_mask, streamer, **options):
        asked.append((ids.tolist(), attention_mask.tolist(), options))
        for value in (ids, 7, 8) if streamer else ():
            streamer.put(value)
        return torch.cat([ids, ids + 10, ids + 20, ids + 30], 1)

    monkeypatch.setitem(peers.state, "hf", SimpleNamespace(generate=generate))
    monkeypatch.setattr(peers.time, "perf_counter", iter([10.0, 11.0, 12.5, 13.0, 14.0, 20.0, 26.0]).__next__)
    assert peers._time_hf(Work([[5, 6]], [3])) == Timing(
        2.5, 4.0, [[15, 16, 25]]), "the prompt comes first, then the first token"
    answer = peers._time_hf(Work([[5, 6], [7]], [3, 2]))
    assert answer == Timing(6.0, 6.0, [[15, 16, 25], [10, 17]]), "it streams no batches"
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert asked == [([[5, 6]], [[1, 1]], {"max_new_tokens": 3, **options}),
                     ([[5, 6], [0, 7]], [[1, 1], [0, 1]], {"max_new_tokens": 3, **options})]
