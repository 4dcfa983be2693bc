"""What may be found again: whole computed blocks, from the beginning on, while their contents stand."""

import pytest
import torch
from helpers.checkpoints import LONGROPE, make_checkpoint
from helpers.engine import make_engine, one_at_a_time

from tplab.cache import BlockPool, BlockTable
from tplab.llm import LLM, SamplingParams


def computed(pool, tokens, count=None):
    """A table with ``tokens``, the first ``count`` of them computed."""
    table = BlockTable(pool)
    table.allocate_slots(len(tokens))
    table.cache_blocks(tokens, len(tokens) if count is None else count)
    return table


def found(pool, tokens):
    return BlockTable(pool).get_computed_blocks(tokens)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_prefix_ends_at_the_first_hole(lost):
    """Blocks behind one that was handed out again are of no use, though they are still there."""
    pool = BlockPool(8, 2)
    table = computed(pool, [1, 2, 3, 4, 5, 6, 7])
    blocks = list(table.block_ids)
    pool.free_blocks([blocks[lost]])
    taken = [pool.get_new_block() for _ in range(pool.num_free)]  # all that are free, the one given back among them
    assert blocks[lost] in taken and pool.num_cached == 2
    assert found(pool, [1, 2, 3, 4, 5, 6, 7]) == blocks[:lost]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", range(10))
def test_only_whole_computed_blocks_are_found(size, count):
    pool, tokens = BlockPool(16, size), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    table = computed(pool, tokens, count)
    assert pool.num_cached == count // size == len(table.keys)
    assert found(pool, [*tokens, 7, 7, 7, 7]) == table.block_ids[:count // size]
    # Token by token it is the same as at once.
    one_by_one = BlockTable(other := BlockPool(16, size))
    for n in range(1, count + 1):
        one_by_one.allocate_slots(n)
        one_by_one.cache_blocks(tokens[:n], n)
    assert one_by_one.keys == table.keys and other.num_cached == pool.num_cached


@pytest.mark.parametrize("tokens", range(1, 10))
def test_the_last_token_is_computed_even_where_its_block_is_cached(tokens):
    """A table that has the keys of all its blocks already does not find the one in which its last token stands."""
    table = computed(BlockPool(8, 2), [3, 1, 4, 1, 5, 9, 2, 6, 5][:tokens])
    assert table.get_computed_blocks([3, 1, 4, 1, 5, 9, 2, 6, 5][:tokens]) == table.block_ids[:(tokens - 1) // 2]


def test_the_first_block_with_a_key_keeps_it():
    pool = BlockPool(8, 2)
    first, second = computed(pool, [1, 2]), computed(pool, [1, 2])
    assert found(pool, [1, 2, 3]) == first.block_ids and pool.num_cached == 1
    second.free()
    assert found(pool, [1, 2, 3]) == first.block_ids
    pool.check([first.block_ids])


def test_nothing_is_found_after_the_contents_were_lost():
    pool = BlockPool(4, 2)
    table = computed(pool, [1, 2, 3, 4])
    pool.reset_prefix_cache()
    assert pool.num_cached == 0 and pool.keys == [None] * 4 and found(pool, [1, 2, 3, 4, 5]) == []
    table.free()
    table.allocate_slots(4)
    table.cache_blocks([1, 2, 3, 4], 4)
    assert found(pool, [1, 2, 3, 4, 5]) == table.block_ids, "computed again, found again"


def test_taking_a_prefix_makes_one_user_more_of_each():
    pool = BlockPool(4, 1)
    table = computed(pool, [1, 2, 3])
    table.free()
    free = pool.num_free
    other = BlockTable(pool)
    other.add_computed_blocks(other.get_computed_blocks([1, 2, 3]))
    assert [pool.ref_counts[b] for b in other.block_ids] == [1, 1] and pool.num_free == free - 2
    third = BlockTable(pool)
    third.add_computed_blocks(third.get_computed_blocks([1, 2, 3]))
    assert [pool.ref_counts[b] for b in third.block_ids] == [2, 2] and pool.num_free == free - 2
    assert not pool.is_free(third.block_ids[0])
    with pytest.raises(AssertionError, match="only stand at the beginning"):
        third.add_computed_blocks(other.block_ids)


def test_an_output_is_found_by_a_prompt_that_repeats_it():
    """A conversation goes on: what was prompt and output is the beginning of the next prompt."""
    engine = make_engine(block_size=2)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    first = engine.add([1, 2, 3], params)
    while engine.scheduler.has_unfinished:
        engine.step()
    second = engine.add([*first.token_ids, 5, 5], params)
    while engine.scheduler.has_unfinished:
        engine.step()
    assert second.metrics.prefix_hit_tokens == 8, "nine tokens, of which the last one was never computed"
    assert second.output_token_ids == one_at_a_time([*first.token_ids, 5, 5], 6, ignore_eos=True)


# Where keys depend on more than the tokens before.


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_equal_beginnings_of_unequal_prompts_are_not_shared_where_keys_depend_on_the_length(tmp_path, rope):
    """Short, then beyond the original length of 32: the long one's beginning is rotated in another way."""
    parameters = LONGROPE if rope == "longrope" else rope
    folder = make_checkpoint(tmp_path / "m", "llama", rope=parameters, max_positions=32 if rope == "dynamic" else 128)
    beginning = torch.randint(67, (44,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [beginning[:20], beginning]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)

    def logprobs(outputs):
        return [[step[token].logprob for step, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids)]
                for o in outputs]

    alone = []
    for prompt in prompts:
        with LLM(folder, 1, "float64", logical=True, block_size=4, max_model_len=64) as llm:
            alone += logprobs(llm.generate([prompt], params))
    with LLM(folder, 1, "float64", logical=True, block_size=4, max_model_len=64) as llm:
        assert not llm.engine.pool.enable_prefix_caching
        together = [logprobs(llm.generate([prompt], params))[0] for prompt in prompts]
    assert together == [pytest.approx(expected, abs=1e-9) for expected in alone]
