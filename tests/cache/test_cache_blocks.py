"""The block pool, block tables and the hash chain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab.cache import BlockPool, BlockTable, CacheError, block_key, blocks_needed, slot_mapping


def table_of(pool, tokens, computed=None):
    table = BlockTable(pool)
    table.add_computed_blocks(table.get_computed_blocks(tokens))
    table.allocate_slots(len(tokens))
    table.cache_blocks(tokens, len(tokens) if computed is None else computed)
    return table


def test_slots_follow_the_table():
    assert slot_mapping([7, 2, 5], range(2, 7), 3) == [7 * 3 + 2, 2 * 3, 2 * 3 + 1, 2 * 3 + 2, 5 * 3]
    assert slot_mapping([4, 1], range(2), 1) == [4, 1]


@given(st.integers(0, 100), st.integers(1, 9))
def test_blocks_needed_is_enough_and_not_more(tokens, size):
    assert blocks_needed(tokens, size) * size >= tokens > (blocks_needed(tokens, size) - 1) * size or tokens == 0


def test_a_key_includes_its_parent():
    assert block_key(block_key(b"", [1, 2]), [3, 4]) != block_key(block_key(b"", [9, 2]), [3, 4])
    assert block_key(b"", [1, 2]) == block_key(b"", (1, 2))
    assert block_key(b"", [1, 2]) != block_key(b"", [2, 1])
    assert block_key(b"", [258]) != block_key(b"", [1, 2])


def test_a_block_behind_another_beginning_is_another_block():
    """[3, 4] behind [1, 2] and behind [9, 9]: each sequence finds its own."""
    pool = BlockPool(8, 2)
    first, second = table_of(pool, [1, 2, 3, 4, 5]), table_of(pool, [9, 9, 3, 4, 5])
    assert BlockTable(pool).get_computed_blocks([9, 9, 3, 4, 7]) == second.block_ids[:2] != first.block_ids[:2]


def test_cached_blocks_are_free_and_evicted_oldest_and_last_first():
    pool = BlockPool(4, 1)
    table = table_of(pool, [1, 2, 3])
    table.free()
    assert pool.num_free == 4 and pool.num_cached == 3
    pool.get_new_block()  # the one that was never used
    pool.get_new_block()  # evicts the end of the sequence, not its beginning
    assert len(BlockTable(pool).get_computed_blocks([1, 2, 3, 4])) == 2


def test_a_sequence_alone_lies_in_one_piece():
    pool = BlockPool(9, 4)
    table = BlockTable(pool)
    for tokens in range(1, 37):
        table.allocate_slots(tokens)
    assert table.block_ids == list(range(table.block_ids[0], table.block_ids[0] + 9))


def test_what_the_pool_refuses():
    pool = BlockPool(1, 2)
    block = pool.get_new_block()
    with pytest.raises(CacheError, match="all 1 blocks are in use"):
        pool.get_new_block()
    pool.free_blocks([block])
    with pytest.raises(CacheError, match="released, but it had no user"):
        pool.free_blocks([block])
    for sizes in ((0, 4), (4, 0), (-1, 4), (2.5, 4), (True, 4)):
        with pytest.raises(CacheError, match="whole number"):
            BlockPool(*sizes)


@given(st.lists(st.tuples(st.sampled_from(["new", "grow", "end"]), st.integers(0, 99), st.integers(1, 12)),
                max_size=60),
       st.integers(1, 4), st.booleans())
def test_accounts_hold_whatever_happens(actions, size, prefix):
    pool, tables = BlockPool(7, size, prefix), []
    for action, which, number in actions:
        if action == "new":
            tokens = ([1, 2, 1, 1, 2] * 3)[which % 3:][:number]
            table = BlockTable(pool)
            table.add_computed_blocks(table.get_computed_blocks(tokens))
            tables.append((table, tokens))
        elif tables:
            table, tokens = tables[which % len(tables)]
            if action == "end":
                table.free()
                tables.remove((table, tokens))
            elif table.num_blocks_to_allocate(len(tokens)) <= pool.num_free:
                table.allocate_slots(len(tokens))
                table.cache_blocks(tokens, len(tokens))
        pool.check([table.block_ids for table, _ in tables])
        assert pool.num_free + pool.num_used == 7


def test_empty_blocks_are_handed_out_before_cached_ones():
    """Whatever the order in which they were given back."""
    pool = BlockPool(5, 1)
    cached, empty = table_of(pool, [1, 2]), table_of(pool, [3, 4], computed=0)
    empty_blocks, cached_blocks = list(empty.block_ids), list(cached.block_ids)
    empty.free()
    cached.free()
    assert {pool.get_new_block() for _ in range(3)} == {4, *empty_blocks} and pool.num_cached == 2
    pool = BlockPool(5, 1)
    cached, empty = table_of(pool, [1, 2]), table_of(pool, [3, 4], computed=0)
    cached.free()
    empty.free()
    assert not {pool.get_new_block() for _ in range(3)} & set(cached_blocks) and pool.num_cached == 2


def test_the_longest_unused_is_evicted_first():
    """Being found and taken is a use."""
    pool = BlockPool(3, 1)
    tables = [table_of(pool, [token], computed=1) for token in (1, 2)]
    first, second = (table.block_ids[0] for table in tables)
    for table in tables:
        table.free()
    again = BlockTable(pool)
    again.add_computed_blocks(again.get_computed_blocks([1, 9]))
    assert again.block_ids == [first]
    again.free()
    assert [pool.get_new_block() for _ in range(3)][1:] == [second, first]


def test_a_neighbour_is_taken_only_where_it_is_free_and_empty():
    pool = BlockPool(4, 1)
    assert pool.get_new_block(after=1) == 2 and pool.get_new_block(after=1) == 0, "2 is in use, so the first free one"
    assert pool.get_new_block(after=3) == 1, "there is none behind the last"
    pool.cache_full_block(1, b"key")
    pool.free_blocks([1])
    assert pool.num_cached == 1 and pool.get_new_block(after=0) == 3, "1 is kept, since it can be found"
    assert pool.get_new_block(after=0) == 1 and pool.num_cached == 0, "until nothing else is left"
    pool = BlockPool(4, 1)
    pool.free_blocks([pool.get_new_block(), pool.get_new_block(after=1)])
    assert pool.get_new_block(after=0) == 1, "the first block has a neighbour too, though 2 would be next"


def test_missing_is_what_grow_allocates():
    pool = BlockPool(9, 4)
    table = BlockTable(pool)
    for tokens, missing, blocks in ((0, 0, 0), (1, 1, 1), (4, 0, 1), (5, 1, 2), (17, 3, 5), (3, 0, 5)):
        assert table.num_blocks_to_allocate(tokens) == missing
        table.allocate_slots(tokens)
        assert len(table) == blocks and table.num_blocks_to_allocate(tokens) == 0 and pool.num_used == blocks
    table.free()
    assert table.block_ids == [] and pool.num_free == 9


def damaged(damage):
    pool = BlockPool(4, 1)
    table = table_of(pool, [1, 2])
    damage(pool, table)
    with pytest.raises(CacheError) as caught:
        pool.check([table.block_ids])
    return str(caught.value)


def test_check_sees_every_kind_of_damage():
    """A block without a user that is not free either is lost for ever: no table names it."""
    assert damaged(lambda pool, table: pool._free.popitem()) == "block 3 has 0 users and is not free"
    assert damaged(lambda pool, table: pool._free.update({table.block_ids[0]: None})
                   ) == "block 0 has 1 user and is free"
    assert damaged(lambda pool, table: table.block_ids.pop()) == \
        "block 1 is leaked: it has 1 user by its count, and is in 0 block tables"
    assert damaged(lambda pool, table: table.block_ids.append(3)
                   ) == "block 3 has 0 users by its count, and is in 1 block table"
    assert damaged(lambda pool, table: pool.keys.insert(0, pool.keys.pop(1))) == \
        "block 0 is found under a key that is not its own", "two of them changed places"
    assert damaged(lambda pool, table: pool.keys.reverse()) == "block 0 is found under a key that is not its own"
