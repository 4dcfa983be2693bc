"""Whole steps of the fast path on real ranks: their ends beside float64, and when the reference computes instead."""

from functools import partial

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.turns import by_turns

from tplab import LLM, SamplingParams
from tplab.align import align_fast
from tplab.cache import Segment
from tplab.checkpoint import open_checkpoint
from tplab.engine.config import EngineConfig
from tplab.fast import make_runner
from tplab.llm.executor import LOAD_TIMEOUT
from tplab.pool import RankPool
from tplab.ranks import RankError, rank, state
from tplab.shard import ShardPlan

pytestmark = pytest.mark.pool

MODELS = {
    "odd sizes, tied": {"model_type": "qwen2", "hidden": 36, "inter": 45, "vocab": 71, "tie": True},
    "uneven heads": {"model_type": "llama", "heads": 9, "kv_heads": 3, "hidden": 63, "inter": 50, "head_dim": 10},
    "few KV heads": {"model_type": "qwen2", "heads": 14, "kv_heads": 2, "hidden": 70, "head_dim": 6},
    "q/k norm": {"model_type": "qwen3", "attention_bias": True, "head_dim": 12, "rope": "yarn"},
    "all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope": "llama3", "layers": 3},
    "length of the prompt": {"model_type": "llama", "rope": "dynamic"},
    "one KV head": {"model_type": "mistral", "heads": 6, "kv_heads": 1, "hidden": 48, "inter": 130, "layers": 1},
}
PROMPTS = [[(7 * i + j) % 60 + 1 for i in range(length)] for j, length in enumerate([11, 40, 23])]
SIZES = [1, 2, 3]  # numbers of ranks


@pytest.fixture(scope="module", params=SIZES)
def pool(request):
    with RankPool(request.param) as pool:
        yield pool


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("pool, name, dtype", by_turns(SIZES, [*MODELS], ["float32", "bfloat16"]),
                         indirect=["pool"])
def test_ends_are_as_close_to_float64_as_the_reference(tmp_path, pool, name, dtype):
    """Chunks of prompts and single tokens of three sequences: hidden states, logits, keys and values."""
    report = align_fast(str(make_checkpoint(tmp_path, **MODELS[name])), PROMPTS, dtype=dtype,
                        tensor_parallel_size=pool.size, pool=pool)
    assert report.ok, str(report)
    assert [diff.point for diff in report.diffs] == ["hidden", "logits", "k_cache", "v_cache"]


def test_ends_of_a_real_model(smollm2, two):
    report = align_fast(smollm2, PROMPTS, dtype="bfloat16", tensor_parallel_size=2, pool=two)
    assert report.ok, str(report)


def tokens(given, pool, **options):
    with LLM(given, pool.size, pool=pool, **options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


IN_CHUNKS = {"max_num_batched_tokens": 16, "block_size": 3}
GENERATED = [("uneven heads", {}), ("q/k norm", IN_CHUNKS), ("all biases", {"block_size": 5}),
             ("length of the prompt", IN_CHUNKS)]


@pytest.mark.parametrize("pool, generated", by_turns(SIZES, GENERATED, least=6), indirect=["pool"])
def test_greedy_tokens_are_the_references(tmp_path, pool, generated):
    """In float32, where rounding decides nothing: with chunks, blocks of another size, sequences that end."""
    name, options = generated
    folder = str(make_checkpoint(tmp_path, **MODELS[name]))
    assert tokens(folder, pool, **options) == tokens(folder, pool, enforce_eager=True, **options)


# Who looks, or has changed something: the reference computes, on all ranks.


def loaded(folder):
    """On a rank: a fast runner with a cache of four blocks."""
    ckpt = open_checkpoint(folder)
    config = EngineConfig(vocab_size=ckpt.config.vocab_size, max_model_len=64, block_size=16, num_blocks=4,
                          tensor_parallel_size=2)
    return make_runner(ckpt, ShardPlan.from_config(ckpt.config, 2), config)


def a_step(runner, count=5):
    ids = torch.arange(1, count + 1)
    with torch.inference_mode():
        return runner.forward(ids, torch.arange(count), [Segment(0, count, (1, 0), count)], [count - 1])


def is_fast(runner) -> bool:
    """Whether a step was computed by the fast path, which hands out no slots."""
    return a_step(runner)[1] is None


def a_hook(runner):
    return runner.model.layers[1].mlp.register_forward_hook(lambda *given: None).remove


def a_recording(runner):
    from tplab.model.trace import recording

    context = recording()
    context.__enter__()
    return partial(context.__exit__, None, None, None)


def another_function(runner):
    from tplab.model import attention

    own = attention.attend
    attention.attend = lambda *given, **named: own(*given, **named)
    return partial(setattr, attention, "attend", own)


def another_module(runner):
    from copy import deepcopy

    layer = runner.model.layers[0]
    own, layer.mlp = layer.mlp, deepcopy(layer.mlp)
    return partial(setattr, layer, "mlp", own)


SPOILERS = [a_hook, a_recording, another_function, another_module]


@pytest.mark.parametrize("spoil, only_rank", by_turns(SPOILERS, [None, 1]))
def test_an_observed_model_is_computed_by_the_reference_on_all_ranks(tmp_path, two, spoil, only_rank):
    """Ranks agree at a command's first step, so each part is a command of its own."""
    folder = str(make_checkpoint(tmp_path, **MODELS["odd sizes, tied"]))
    two.run(_keep, folder, timeout=LOAD_TIMEOUT)
    assert two.run(_fast_kept) == [True, True]
    right = two.run(_logits_kept)
    two.run(_spoil_kept, spoil, only_rank)
    assert two.run(_fast_kept) == [False, False]
    for ours, its in zip(two.run(_logits_kept), right):
        assert (ours - its).norm() <= 1e-5 * its.norm()
    two.run(_end_kept)
    assert two.run(_fast_kept) == [True, True]
    two.run(_forget)


def _keep(folder):
    state["fast test"] = {"runner": loaded(folder)}


def _kept_runner():
    return state["fast test"]["runner"]


def _fast_kept():
    return is_fast(_kept_runner())


def _logits_kept():
    return a_step(_kept_runner())[0].clone()


def _spoil_kept(spoil, only_rank):
    if only_rank in (None, rank()):
        state["fast test"]["end"] = spoil(_kept_runner())


def _end_kept():
    if end := state["fast test"].pop("end", None):
        end()


def _forget():
    del state["fast test"]


def _with_threads(counts):
    """Logits of steps of 1, 5 and 30 tokens, with so many threads each time."""
    own = torch.get_num_threads()
    try:
        found = []
        for count in counts:
            torch.set_num_threads(count)
            found.append([a_step(_kept_runner(), tokens)[0].clone() for tokens in (1, 5, 30)])
        return found
    finally:
        torch.set_num_threads(own)


@pytest.mark.parametrize("name", ["odd sizes, tied", "uneven heads", "all biases"])
def test_threads_of_a_rank_compute_the_same_bits(tmp_path, two, name):
    two.run(_keep, str(make_checkpoint(tmp_path, **MODELS[name])), timeout=LOAD_TIMEOUT)
    for one, *others in two.run(_with_threads, [1, 2, 3]):
        for other in others:
            assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("table", [(0, 4), (-1, 0)])
def test_a_block_that_is_not_there_is_neither_read_nor_written(tmp_path, two, table):
    two.run(_keep, str(make_checkpoint(tmp_path, **MODELS["odd sizes, tied"])), timeout=LOAD_TIMEOUT)
    with pytest.raises(RankError, match=f"IndexError: block tables name blocks {min(table)} to {max(table)}; there are "
                                        "0 to 3"):
        two.run(_a_step_of, table)
    assert two.run(_fast_kept) == [True, True]


def _a_step_of(table):
    with torch.inference_mode():
        _kept_runner().forward(torch.arange(20), torch.arange(20), [Segment(0, 20, table, 20)], [19])


# A rank that does something else than the others' step.


def _something_else(folder, what):
    runner = loaded(folder)
    a_step(runner)
    if rank() == 1:
        what()
    else:
        a_step(runner)


def another_collective():
    from tplab.ranks import all_reduce

    all_reduce(torch.ones(3, 2))


def an_error():
    raise ValueError("rank 1 ends here")


@pytest.mark.parametrize("what, message", [
    (another_collective, r"rank 0 calls all_reduce \[5, 36\] .*; rank 1 calls all_reduce \[3, 2\]"),
    (an_error, "rank 1 raised ValueError")], ids=lambda what: getattr(what, "__name__", ""))
def test_a_rank_in_compiled_code_does_not_wait_for_ever(tmp_path, two, what, message):
    folder = str(make_checkpoint(tmp_path, **MODELS["odd sizes, tied"]))
    with pytest.raises(RankError, match=message):
        two.run(_something_else, folder, what, timeout=LOAD_TIMEOUT)
    assert two.run(rank) == [0, 1]


