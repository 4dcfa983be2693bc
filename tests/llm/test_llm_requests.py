"""Bad requests: each named, none of them takes another one down."""

import json

import numpy as np
import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.cache import CacheError
from tplab.checkpoint import open_checkpoint
from tplab.engine import EngineError, RequestError
from tplab.engine.config import EngineConfig
from tplab.errors import TplabError
from tplab.faults import FaultError
from tplab.llm import LLM, SamplingParams
from tplab.llm.requests import RejectedRequest
from tplab.model.dtypes import DtypeError
from tplab.patch import Patch, PatchError
from tplab.shard import ShardPlan, ShardPlanError

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("requests") / "m", max_positions=48)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, 2, logical=True, strict=True, block_size=4, num_blocks=10) as llm:
        yield llm


BAD = {
    "empty": ([], "empty"),
    "too long": ([1] * 48, "has 48 tokens; prompt and output together can have 48"),
    "too large an id": ([1, 67], "token id 67 is not in the vocabulary: 0 to 66"),
    "a negative id": ([-1], "token id -1 is not in the vocabulary"),
    "a number that is no id": ([1.5], "token id 1.5"),
    "a truth value": ([True], "token id True"),
    "more blocks than there are": ([1] * 38,
                                   r"38 prompt tokens and 4 new ones need 11 blocks of 4, but the cache has 10; "
                                             r"ask for at most 3 tokens \(max_tokens\), or make an LLM with "
                                             r"num_blocks=11"),
    "text without a tokenizer": ("hello", "no tokenizer"),
    "neither text nor ids": (3.5, "must be a text or a list of token ids"),
    "a number whose digits Python refuses to write": ([10**5000], "token id a value of type int"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_is_named_and_its_neighbours_run(llm, name):
    bad, message = BAD[name]
    with pytest.raises(RequestError, match=message):
        llm.generate([bad], GREEDY)
    alone = llm.generate([[1, 2, 3], [4, 5]], GREEDY)
    with pytest.warns(UserWarning, match="prompt 1 cannot run"):
        first, wrong, last = llm.generate([[1, 2, 3], bad, [4, 5]], GREEDY)
    assert [o.outputs[0].token_ids for o in (first, last)] == [o.outputs[0].token_ids for o in alone]
    assert wrong.outputs[0].finish_reason == "error" and wrong.finished and wrong.outputs[0].token_ids == []
    for prompt in [1, 2], (1, 2):
        told = RejectedRequest(prompt, wrong.error).output()
        assert (told.prompt_token_ids, told.prompt, told.error) == ([1, 2], None, wrong.error)
    assert isinstance(wrong.error, RequestError) and not llm.has_unfinished_requests


def test_all_bad_is_one_error_that_names_all(llm):
    with pytest.raises(RequestError, match="empty") as caught:
        llm.generate([[], [99]], GREEDY)
    assert "99" in caught.value.__notes__[0]


@pytest.mark.parametrize("prompts", [None, 5, {}, "", {"prompt": "a"}, []])
def test_what_is_no_prompt_at_all(llm, prompts):
    with pytest.raises(RequestError, match="no tokenizer" if prompts == "" else "a list of these with at least one"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [[GREEDY], {"temperature": 0}, [GREEDY, None], "greedy", [GREEDY] * 3])
def test_parameters_that_do_not_fit_the_prompts(llm, params):
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate([[1], [2]], params)


def test_stop_conditions_that_cannot_be(llm):
    with pytest.raises(RequestError, match="stop token id 67"):
        llm.generate([[1]], SamplingParams(stop_token_ids=[67]))
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate([[1]], SamplingParams(stop="a"))


def test_output_ends_where_the_model_ends(folder):
    with LLM(folder, 1, logical=True) as llm:
        (output,) = llm.generate([[1] * 40], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"


def test_the_whole_cache_can_be_used(llm):
    """41 tokens fit into 10 blocks of 4: the last one is never read again."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([[1] * 37], params)
    assert len(output.outputs[0].token_ids) == 4 and output.metrics.blocks_used == 10


def test_abort(llm):
    numbers = [llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
               for _ in range(2)]
    llm.step()
    output = llm.abort(numbers[0])
    assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) == 1
    with pytest.raises(RequestError, match=f"no unfinished request {numbers[0]}; there are: {numbers[1]}"):
        llm.abort(numbers[0])
    while llm.has_unfinished_requests:
        outputs = llm.step()
    assert len(outputs[0].outputs[0].token_ids) == 9


@pytest.mark.parametrize("number", [[], True, None, 0.5, {}])
def test_abort_of_what_is_no_number_of_a_request(llm, number):
    ours = [llm.add_request([1, 2], GREEDY) for _ in range(2)]
    with pytest.raises(RequestError, match="there is no unfinished request"):
        llm.abort(number)
    for each in ours:
        llm.abort(each)


@pytest.mark.parametrize("prompt", [5, np.int64(5), None, {1: 2}])
def test_one_prompt_is_not_a_number(llm, prompt):
    with pytest.raises(RequestError, match="a prompt must be a text or a list of token ids"):
        llm.add_request(prompt)
    assert not llm.has_unfinished_requests


def test_numpy_numbers_are_as_good_as_pythons(folder):
    with LLM(folder, np.int64(2), logical=True, strict=True, block_size=np.int32(4), num_blocks=np.int64(10),
             max_model_len=np.int16(40), max_num_seqs=np.uint8(2), max_num_batched_tokens=np.int64(8)) as llm:
        theirs = llm.generate([np.array([1, 2, 3])[i] for i in range(3)], GREEDY)
        ours = llm.generate([1, 2, 3], GREEDY)
        assert theirs[0].outputs[0].token_ids == ours[0].outputs[0].token_ids
        json.dumps(theirs[0].to_dict())
        assert all(type(size) is int for size in (llm.plan.tensor_parallel_size, llm.engine.pool.num_blocks,
                   llm.engine.pool.block_size, llm.engine.config.max_model_len, llm.engine.config.max_num_seqs))


@pytest.mark.parametrize("options,error,message", [
    ({"num_blocks": 10**15}, EngineError,
     r"num_blocks=1000000000000000 with block_size=16 needs \d+\.\d GB on a rank, but this "
                                          r"machine has \d+\.\d GB; num_blocks times block_size can be at most \d+"),
    ({"block_size": 10**15}, EngineError, "block_size=1000000000000000 needs"),
    ({"num_blocks": True}, CacheError, "num_blocks must be"),
    ({"max_model_len": True}, EngineError, "max_model_len must be"),
    ({"tensor_parallel_size": True}, ShardPlanError, "tensor_parallel_size must be"),
    ({"pool": 2}, EngineError, r"pool must be a RankPool, such as RankPool\(2\), or None, not 2"),
    ({"patches": None}, PatchError, "patches must be a list of faults, their names or Patch objects"),
    ({"patches": "nan_mask"}, PatchError, r"such as \['nan_mask'\], not 'nan_mask'"),
    ({"patches": [5]}, PatchError, "patches holds 5, which is no fault"),
    ({"patches": ["nan_musk"]}, FaultError, "there is no fault 'nan_musk'; did you mean 'nan_mask' or"),
    ({"tensor_parallel_size": 5}, ShardPlanError, "5 ranks cannot share 4 query heads"),
    ({"dtype": "float16"}, DtypeError, "float32, float64, bfloat16"),
    ({"block_size": 0}, EngineError, "block_size must be"),
    ({"num_blocks": 0}, CacheError, "num_blocks must be"),
    ({"num_blocks": "many"}, CacheError, "num_blocks must be"),
    ({"max_model_len": 49}, EngineError, "max_model_len must be a whole number from 2 to 48"),
    ({"max_num_seqs": 0}, EngineError, "max_num_seqs must be"),
    ({"max_num_batched_tokens": 0}, EngineError, "max_num_batched_tokens must be"),
    ({"patches": [Patch("tplab.cache.paged.no_such_thing", print)]}, PatchError, "no function"),
], ids=str)  # fmt: skip
def test_an_engine_that_cannot_be(folder, options, error, message):
    with pytest.raises(error, match=message) as caught:
        LLM(folder, logical=True, **options)
    assert isinstance(caught.value, TplabError)


def test_a_closed_engine_says_so(folder):
    llm = LLM(folder, 1, logical=True)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate([[1]]), llm.step, lambda: next(llm.stream([[1]]))):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_default_sizes(folder):
    """A GiB over all ranks at most, room for one sequence of full length at least where it was asked for."""
    config = open_checkpoint(folder).config
    plan = ShardPlan.from_config(config, 2)
    made = EngineConfig.for_model(config, plan, torch.float32)
    assert (made.max_model_len, made.num_blocks, made.block_size) == (48, 48, 16)


def test_leaked_blocks_come_to_light(folder):
    """With a scheduler that never gives blocks back, strict mode names the block; without, the engine stands still."""
    leak = Patch("tplab.engine.scheduler.free", lambda sequence: None)
    with LLM(folder, 1, logical=True, strict=True, patches=[leak]) as llm:
        with pytest.raises(EngineError, match="block 0 is leaked"):
            llm.generate([[1, 2]], GREEDY)
    with LLM(folder, 1, logical=True, patches=[leak], block_size=4, num_blocks=4) as llm:
        with pytest.raises(EngineError,
                           match="no sequence can go on: 4 of 4 blocks are in use, but running sequences hold only 0"):
            for _ in range(9):
                llm.generate([[1, 2]], GREEDY)


@pytest.mark.parametrize("patch,message", [
    (Patch("tplab.cache.paged.slot_mapping",
           lambda block_ids, positions, block_size: [block_ids[p // block_size] * block_size + p % block_size + 1
                                                     for p in positions]), "but its blocks are"),
    (Patch("tplab.engine.sampler.best_offer", lambda offer_here: offer_here[:, 1].long()), "rank 1 drew"),
    (Patch("tplab.engine.scheduler.computed_after_prefix_hit", lambda blocks, block_size: 0),
     "sequences share|written before"),
], ids=["slot off by one", "rank-local sampling", "prefix computed again"])
def test_strict_names_what_other_bugs_do(folder, patch, message):
    from tplab.engine import StrictError

    with LLM(folder, 2, logical=True, strict=True, patches=[patch], block_size=4, num_blocks=12) as llm:
        with pytest.raises(TplabError, match=message) as caught:
            for _ in range(2):
                llm.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 2,
                             SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert isinstance(caught.value, StrictError)
