"""What the engine makes of the ranks' answers: ends, times, a standstill, the strict checks; and how large it is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.engine import EOS, VOCAB, make_engine, one_at_a_time

from tplab.align import diagnose
from tplab.checkpoint import open_checkpoint
from tplab.engine import EngineError, RequestError
from tplab.engine.config import EngineConfig, bytes_per_token
from tplab.engine.errors import StandstillError, StrictError
from tplab.engine.step import ModelRunnerOutput
from tplab.llm import SamplingParams
from tplab.shard import ShardPlan


def endless(**params):
    return SamplingParams(**{"temperature": 0, "max_tokens": None, "ignore_eos": True} | params)


def ends(prompt, **params):
    engine = make_engine()
    sequence = engine.add(prompt, SamplingParams(temperature=0, **params))
    while engine.scheduler.has_unfinished:
        engine.step()
    assert engine.pool.num_used == 0
    return sequence.output_token_ids, sequence.finish_reason, sequence.stop_reason


def test_how_a_sequence_ends():
    prompt = next([n] for n in range(1, VOCAB) if EOS in one_at_a_time([n], 20)[3:])
    tokens = one_at_a_time(prompt, 20)
    stop, at = tokens[1], tokens.index(tokens[1])
    assert ends(prompt, max_tokens=20) == (tokens, "stop", None)
    assert ends(prompt, max_tokens=len(tokens)) == (tokens, "stop", None), "the end of text on the last token is an end"
    assert ends(prompt, max_tokens=len(tokens) - 1) == (tokens[:-1], "length", None)
    assert ends(prompt, max_tokens=20, stop_token_ids=[stop]) == (tokens[:at + 1], "stop", stop)
    assert ends(prompt, max_tokens=20, stop_token_ids=[EOS]) == (tokens, "stop", EOS), "asked for, so it is named"
    assert ends(prompt, max_tokens=20, stop_token_ids=[EOS], ignore_eos=True) == (tokens, "stop", EOS)
    assert ends(prompt, max_tokens=20, ignore_eos=True) == (one_at_a_time(prompt, 20, ignore_eos=True), "length", None)
    assert len(ends(prompt, max_tokens=None, ignore_eos=True)[0]) == 60 - len(prompt)


def test_what_fits_exactly_is_taken_and_one_more_is_not():
    engine = make_engine(num_blocks=3, block_size=4, max_model_len=14)
    assert engine.check_prompt([1] * 9, SamplingParams(max_tokens=4)) == 4
    with pytest.raises(RequestError, match=r"9 prompt tokens and 5 new ones need 4 blocks of 4, but the cache has 3; "
                                           r"ask for at most 4 tokens \(max_tokens\), or make an LLM with "
                                           r"num_blocks=4"):
        engine.check_prompt([1] * 9, SamplingParams(max_tokens=5))
    with pytest.raises(RequestError, match="need 4 blocks of 4, but the cache has 3; make an LLM with"):
        engine.check_prompt([1] * 13, SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="the prompt has 14 tokens; prompt and output together can have 14"):
        engine.check_prompt([1] * 14, SamplingParams(max_tokens=1))
    roomy = make_engine(max_model_len=14)
    assert roomy.check_prompt([0, VOCAB - 1], SamplingParams(max_tokens=None)) == 12
    assert roomy.check_prompt([1] * 13, SamplingParams(max_tokens=5, stop_token_ids=[VOCAB - 1])) == 1
    for wrong in ([VOCAB], [-1], [True]):
        with pytest.raises(RequestError, match="is not in the vocabulary: 0 to 10"):
            roomy.check_prompt(wrong, SamplingParams())
    with pytest.raises(RequestError, match="stop token id 11 is not in the vocabulary: 0 to 10"):
        roomy.check_prompt([1], SamplingParams(stop_token_ids=[1, VOCAB]))


# A standstill.


def standstill(engine):
    with pytest.raises(StandstillError, match="no sequence can go on") as caught:
        for _ in range(30):
            engine.step()
    return caught.value


def test_a_standstill_with_blocks_in_use_by_no_sequence_is_a_leak():
    engine = make_engine(num_blocks=4, block_size=2)
    engine.pool.get_new_block()
    engine.add([1, 2, 3, 4, 5, 6, 7], endless(max_tokens=1))
    error = standstill(engine)
    assert (error.used, error.held, error.waiting) == (1, 0, [(0, 7, 0)])
    assert diagnose(error).fault == "block_leaked"


def test_blocks_that_waiting_sequences_hold_are_no_leak():
    """Three blocks belong to sequences that wait, one of them to two: nothing has leaked, whatever else is wrong."""
    engine = make_engine(num_blocks=4, block_size=2)
    _, holds, shares = (engine.add([1, 2, 3, 4, 5, 6, 7], endless(max_tokens=1)) for _ in range(3))
    holds.block_table.allocate_slots(6)
    shares.block_table.add_computed_blocks(holds.block_table.block_ids[:1])
    error = standstill(engine)
    assert error.used == error.held == 3 and [number for number, _, _ in error.waiting] == [0, 1, 2]
    assert diagnose(error).fault != "block_leaked"


# Strict.


def answered(engine, change):
    """The ranks' answers to every step, changed by ``change(outputs)``."""
    execute = engine.executor.execute_model
    engine.executor.execute_model = lambda step: change(execute(step))


@pytest.mark.parametrize("change,message", [
    (lambda o: [o[0], ModelRunnerOutput({0: (o[1].sampled_token_ids[0] + 1) % VOCAB}, {}, o[1].slots)],
     "rank 0 drew .*, rank 1 drew"),
    (lambda o: [o[0], o[1]._replace(slots=[[slot + 1 for slot in slots] for slots in o[1].slots])],
     r"rank 0 wrote slots \[\[0, 1\]\], rank 1 wrote \[\[1, 2\]\]"),
    (lambda o: [a._replace(slots=[[slot + 4 for slot in slots] for slots in a.slots]) for a in o],
     r"sequence 0 wrote slot 4 \(block 1, place 0\), but its blocks are \[0\]"),
    (lambda o: [a._replace(slots=[[0] * len(slots) for slots in a.slots]) for a in o],
     r"sequence 0 wrote slot 0 \(block 0, place 0\), which was written before"),
], ids=["tokens", "slots", "another sequence's block", "twice"])
def test_strict_names_what_ranks_do_wrong(change, message):
    engine = make_engine(ranks=2, strict=True)
    engine.add([1, 2], endless())
    answered(engine, change)
    with pytest.raises(StrictError, match=message) as caught:
        engine.step()
    assert bool(caught.value.drawn) == ("drew" in message)


def test_strict_sees_a_write_into_a_shared_block_and_a_leak():
    engine = make_engine(strict=True)
    sequence = engine.add([1, 2], endless())
    engine.step()
    engine.pool.touch(sequence.block_table.block_ids[0])
    with pytest.raises(StrictError, match="which 2 sequences share"):
        engine.step()
    engine = make_engine(strict=True)
    engine.add([1, 2], endless())
    engine.pool.get_new_block()
    with pytest.raises(StrictError, match="step 1: block 0 is leaked"):
        engine.step()
    engine = make_engine(strict=True, max_num_batched_tokens=2)
    engine.add([1, 2, 3], endless())
    engine.pool.get_new_block()
    with pytest.raises(StrictError, match="step 1: block 0 is leaked"):
        engine.step()  # in which no sequence gets a token


def test_strict_allows_what_is_right():
    """A block that was handed out again, and one that was computed again after a restart, may be written again."""
    engine = make_engine(num_blocks=2, block_size=2, strict=True)
    for _ in range(3):
        engine.add([1, 2, 3], endless(max_tokens=1))
        engine.add([4, 5, 6], endless(max_tokens=1))
    while engine.scheduler.has_unfinished:
        engine.step()
    sequence = engine.add([1, 2], endless(max_tokens=3))
    engine.step()
    engine.executor.lose_everything()
    engine.recompute()
    while engine.scheduler.has_unfinished:
        engine.step()
    assert sequence.output_token_ids == one_at_a_time([1, 2], 3, ignore_eos=True)


# Sizes.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("core") / "m", layers=1, max_positions=64)


def sizes(model, plan, dtype, block_size, num_blocks, max_model_len, max_num_seqs):
    config = EngineConfig.for_model(model, plan, dtype, block_size=block_size, num_blocks=num_blocks,
                                    max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    return config.max_model_len, config.num_blocks, config.block_size


@pytest.mark.parametrize("options,size", [
    ((16, None, None, 16), (64, 16 * 4)),  # block_size, num_blocks, max_model_len, max_num_seqs
    ((16, None, None, 3), (64, 12)),
    ((5, None, None, 1), (64, 13)),
    ((16, None, 20, 3), (20, 6)),
    ((16, 7, None, 3), (64, 7)),
    ((16, 7, 2, 3), (2, 7)),
    ((16, None, 64, 1), (64, 4)),
], ids=str)
def test_sizes_follow_from_each_other(folder, options, size):
    config = open_checkpoint(folder).config
    assert sizes(config, ShardPlan.from_config(config, 2), torch.float32, *options) == (*size, options[0])


def test_a_small_budget_of_bytes(folder, monkeypatch):
    """What fits is what is given, but for a length that was asked for."""
    config = open_checkpoint(folder).config
    plan = ShardPlan.from_config(config, 4)  # two KV heads on four ranks: each of them twice
    per_token = bytes_per_token(config, sum(plan.sizes("kv_heads")), torch.bfloat16)
    assert per_token == 2 * 1 * 4 * 8 * 2
    monkeypatch.setattr("tplab.engine.config.CACHE_BYTES", per_token * 16 * 2 + 1)
    assert sizes(config, plan, torch.bfloat16, 16, None, None, 9) == (32, 2, 16)
    assert sizes(config, plan, torch.bfloat16, 16, None, 33, 9) == (33, 3, 16)
    for wrong in (1, 65, 8.0):
        with pytest.raises(EngineError, match="max_model_len must be a whole number from 2 to 64"):
            sizes(config, plan, torch.bfloat16, 16, None, wrong, 9)


def test_a_cache_must_fit_into_the_memory_of_one_rank(folder, monkeypatch):
    config = open_checkpoint(folder).config
    plan = ShardPlan.from_config(config, 4)  # one KV head on each rank
    monkeypatch.setattr("tplab.engine.config.psutil.virtual_memory", lambda: SimpleNamespace(total=32 * 16 * 7))
    assert sizes(config, plan, torch.bfloat16, 16, 7, None, 9) == (64, 7, 16)
    with pytest.raises(EngineError, match="num_blocks times block_size can be at most 112"):
        sizes(config, plan, torch.bfloat16, 16, 8, None, 9)
    config = replace(config, num_heads=3, num_kv_heads=3)
    plan = ShardPlan.from_config(config, 2)  # two KV heads on the rank that has the most
    assert sizes(config, plan, torch.bfloat16, 16, 3, None, 9) == (64, 3, 16)
    with pytest.raises(EngineError, match="num_blocks times block_size can be at most 56"):
        sizes(config, plan, torch.bfloat16, 16, 4, None, 9)
