"""What the ranks are told in a step, and what they remember of the last one."""

import pytest
from helpers.checkpoints import make_checkpoint
from helpers.engine import make_engine

from tplab.cache import Segment
from tplab.engine import sampler
from tplab.engine.step import SamplingMetadata, ScheduledRequest, SchedulerOutput
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch
from tplab.ranks import RankError, rank


def endless(**params):
    return SamplingParams(**{"temperature": 0, "max_tokens": None, "ignore_eos": True} | params)


def told(engine):
    """What the ranks were told last, by sequence."""
    return {part.request_id: part for part in engine.executor.told[-1].requests}


# What is said.


def test_every_parameter_of_a_draw_arrives():
    engine = make_engine()
    params = [endless(temperature=0.7, top_k=5, top_p=0.9, min_p=0.2, seed=0, logprobs=2),
              endless(temperature=1.3, top_k=-1, top_p=0.8, min_p=0.1, seed=2**62),
              endless(temperature=0, top_k=1, seed=7, logprobs=0)]
    for p in params:
        engine.add([1, 2], p)
    for position in range(3):
        engine.step()
        assert [part.sampling for part in told(engine).values()] == [
            SamplingMetadata(0.7, 5, 0.9, 0.2, 0, position, 2),
            SamplingMetadata(1.3, -1, 0.8, 0.1, 2**62, position, None),
            SamplingMetadata(0.0, 1, 1.0, 0.0, 7, position, 0)]


def test_a_step_survives_the_wire():
    draw = SamplingMetadata(0.5, 3, 0.25, 0.125, 2**62 + 1, 7, 0)
    step = SchedulerOutput(3, (ScheduledRequest(4, Segment(2, 1, [5, 1], 3), (), draw),
                         ScheduledRequest(6, Segment(0, 2, [0], 9), (8, 1), None)))
    back = SchedulerOutput.from_json(step.to_json())
    assert back == step and isinstance(back.requests[0].segment, Segment)
    assert isinstance(back.requests[0].sampling, SamplingMetadata)
    assert isinstance(back.requests[1].token_ids, tuple)


def test_seed_0_is_a_seed_and_no_seed_is_another_one_every_time():
    engine = make_engine()
    seeds = [engine.add([1], SamplingParams(seed=seed)).seed for seed in (0, 0, 5, None, None)]
    assert seeds[:3] == [0, 0, 5] and len({*seeds[3:], 0}) == 3
    engine.step()
    assert [part.sampling.seed for part in told(engine).values()] == seeds, "also those that the engine drew"


def test_a_prompt_is_told_in_chunks_and_drawn_tokens_are_not_told_again():
    engine = make_engine(max_num_batched_tokens=4)
    sequence = engine.add([5, 6, 7, 8, 9, 1], endless())
    engine.step()
    (part,) = told(engine).values()
    assert part.token_ids == (5, 6, 7, 8) and part.sampling is None and part.segment == Segment(0, 4, [0], 6)
    engine.step()
    (part,) = told(engine).values()
    assert part.token_ids == (9, 1) and part.sampling.position == 0 and part.segment == Segment(4, 2, [0, 1], 6)
    for position in (1, 2):
        engine.step()
        (part,) = told(engine).values()
        assert part.token_ids == () and part.sampling.position == position
        assert part.segment == Segment(5 + position, 1, sequence.block_table.block_ids, 6)


# What a rank remembers, with a model.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("step") / "m", layers=1, max_positions=64)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]


def tokens_of(llm):
    """Step by step to the end; the number of failed steps."""
    for prompt in PROMPTS:
        llm.add_request(prompt, endless(max_tokens=8, temperature=1.0, seed=11))
    done, failed = {}, 0
    while llm.has_unfinished_requests:
        try:
            outputs = llm.step()
        except RankError:
            failed += 1
        else:
            done |= {output.request_id: output.outputs[0].token_ids for output in outputs}
    return list(done.values()), failed


@pytest.mark.parametrize("broken_rank", [0, 1])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_fails_on_one_rank_changes_no_token(folder, broken_rank, where):
    """Before or after its draw: the other rank has drawn the next token by then, or nothing."""
    with LLM(folder, 2, "float64", logical=True, block_size=4) as llm:
        undisturbed, _ = tokens_of(llm)
    calls = [0, 0]

    def fails_in_the_fourth(model, logits_here, draws):
        calls[rank()] += 1
        fail = rank() == broken_rank and calls[rank()] in (4, 7)
        if fail and where == "before":
            raise ValueError("this rank alone")
        found = sampler.sample(model, logits_here, draws)
        if fail:
            raise ValueError("this rank alone")
        return found

    patch = Patch("tplab.engine.runner.sample", fails_in_the_fourth)
    with LLM(folder, 2, "float64", logical=True, block_size=4, patches=[patch]) as llm:
        disturbed, failed = tokens_of(llm)
    assert failed == 2 and disturbed == undisturbed
