"""Notebook 05: positions to slots, a cache in blocks, the key of a block. The pool is in ``pool_of_blocks.py``."""

from collections.abc import Callable

import torch

from tplab.cache import paged
from tplab.checks import shown
from tplab.lesson.mine import Mine, NotYet, kind, tensor
from tplab.lesson.verdict import Setting, exercise
from tplab.model.attention import AttentionBatch
from tplab.patch import Patch

# In the engine: blocks of 3, so that no number of the notebook's fits.
ENGINE = {"decode": True, "new_tokens": 5, "block_size": 3}


@exercise("my_slot_mapping", "05", takes="block_ids, positions, block_size",
          agreed="on {ranks}, every position that was computed agrees with Hugging Face")
def my_slot_mapping(mine: Mine, setting: Setting):
    """On tables and sizes of which the notebook shows the first; then in the engine."""
    for table, positions, size in (([4, 1, 3], range(10), 4), ([4, 1, 3], range(7, 8), 4), ([2, 5, 0, 7], range(11), 3),
                                   ([6, 0, 9], range(4, 12), 5)):
        slots = mine(table, positions, size)
        head = f"block table {table}, block size {size}: "
        if not isinstance(slots, list) or not all(type(slot) is int for slot in slots):
            strange = [slot for slot in slots if type(slot) is not int] if isinstance(slots, list) else []
            raise NotYet(f"it returns {kind(slots)}{f', {shown(strange[0])} among them' if strange else ''}; a list of "
                         "whole numbers must come back, one slot per position")
        if len(slots) != len(positions):
            raise NotYet(f"{head}for {len(positions)} position{'s' * (len(positions) > 1)} come {len(slots)} slots; it "
                         "must be one for each")
        if slots == [table[position // size] * size for position in positions]:
            raise NotYet(f"{head}all positions of a block go to its first slot: how many tokens stand before each in "
                         "this block?")
        for says, wrong in {
            f"block number + place: how many slots do the blocks before block {table[0]} have?":
                [table[p // size] + p % size for p in positions],
            "the block's first slot + the position: how many tokens stand before it in *this* block?":
                [table[p // size] * size + p for p in positions],
            "the slots of the first positions: it counts the entries of positions instead of reading them":
                [table[n // size] * size + n % size for n, _ in enumerate(positions)]}.items():
            if slots == wrong and positions[-1] >= size and any(slot != table[p // size] * size + p % size
                                                               for p, slot in zip(positions, slots)):
                raise NotYet(f"{head}yours are {says}")
        for position, slot in zip(positions, slots):
            _slot(f"{head}position {position} goes to slot {slot}", table, position, size, slot)
    setting.align(Patch("tplab.cache.paged.slot_mapping", mine.function), **ENGINE)


def _slot(head: str, table: list[int], position: int, size: int, slot: int) -> None:
    index, right = divmod(position, size)
    block, place = divmod(slot, size)
    if (block, place) == (table[index], right):
        return
    if slot == table[min(position // 4, len(table) - 1)] * 4 + position % 4:
        raise NotYet(f"{head}: is there a 4 in your code where the block size should stand?")
    if slot == table[index] * size + right - 1:
        raise NotYet(f"{head}, one too early: positions and places both count from 0, so what is there to subtract?")
    if block not in table:
        raise NotYet(f"{head}, which is in block {block} and belongs to somebody else; which entry of the table is the "
                     "position in?")
    if block != table[index]:
        raise NotYet(f"{head} in block {block}, but it is the table's entry {index} that holds positions "
                     f"{index * size} to {index * size + size - 1}")
    raise NotYet(f"{head}, place {place} of the right block; how many tokens stand before it in this block?")


@exercise("my_write_read", "05", takes="cache, block_ids, start, new", writes="cache",
          agreed="on {ranks}, every key and value goes where the table says and comes back in order")
def my_write_read(mine: Mine, setting: Setting):
    """A cache full of other readers' numbers: a chunk, one token, a first prompt, two tokens over a block's edge."""
    for table, size, start, count in (([1, 4, 3], 4, 5, 4), ([2, 0, 5], 3, 3, 1), ([3, 0], 5, 0, 7),
                                      ([3, 1, 4, 0], 2, 3, 2)):
        cache, new = torch.arange(36.0 * size).view(6, size, 2, 3) / 8 + 1, -torch.arange(6.0 * count).view(count, 2, 3)
        slots = [table[p // size] * size + p % size for p in range(start + count)]
        after = cache.clone()
        after.view(-1, 2, 3)[slots[start:]] = new
        found = mine(cache, table, start, new)
        head = f"block table {table}, blocks of {size}, {start} tokens there and {count} new: "
        _written(head, table, cache, after, mine.given[0], slots, start)
        if isinstance(found, torch.Tensor) and found.dim() == 3 and len(found) == len(table) * size:
            raise NotYet(f"{head}all {len(found)} places of its blocks come back; how many of them hold a token of "
                         "this sequence by now?")
        if start and isinstance(found, torch.Tensor) and found.shape in ((start, 2, 3), (count, 2, 3)):
            raise NotYet(f"{head}{len(found)} tokens come back; those that were there *and* the new ones are asked for")
        tensor(found, "tokens, kv heads, head_dim", (start + count, 2, 3), torch.float32)
        _in_order(head, found, after, cache, slots)
    setting.align(Patch("tplab.cache.paged.PagedContext.batches", batches_through(mine.function)), **ENGINE)


def _written(head: str, table: list[int], before, after, mine, slots: list[int], start: int) -> None:
    if mine.shape != before.shape:
        raise NotYet(f"{head}the cache goes in as {list(before.shape)} and must stay so; yours is {list(mine.shape)}")
    size = before.shape[1]
    changed = (mine != before).flatten(2).any(-1).flatten().nonzero()[:, 0].tolist()
    wrong = (mine != after).flatten(2).any(-1).flatten().nonzero()[:, 0].tolist()
    if not changed:
        raise NotYet(f"{head}the cache is as it was before: nothing was written, or into a copy, which an index "
                     "with a list or a tensor makes")
    if changed[-1] == table[(len(slots) - 1) // 4] * 4 + (len(slots) - 1) % 4 != slots[-1]:
        raise NotYet(f"{head}position {len(slots) - 1} was written into block {changed[-1] // size}: is there a 4 in "
                     "your code where the cache's own block size should stand?")
    strangers = [slot for slot in changed if slot not in slots]
    if strangers:
        raise NotYet(f"{head}place {strangers[0] % size} of block {strangers[0] // size} has changed, which is none of "
                     "this sequence's positions: whose memory is it?")
    if overwritten := [slot for slot in changed if slot in slots[:start]]:
        raise NotYet(f"{head}position {slots.index(overwritten[0])} was there before and has been overwritten; where "
                     f"does the first new token stand?")
    if wrong:
        raise NotYet(f"{head}position {slots.index(wrong[0])} is not at place {wrong[0] % size} of block "
                     f"{wrong[0] // size}, where the table has it")


def _in_order(head: str, found, after, before, slots: list[int]) -> None:
    rows, old = after.view(-1, *after.shape[2:]), before.view(-1, *after.shape[2:])
    for position, (row, slot) in enumerate(zip(found, slots)):
        if row.equal(rows[slot]):
            continue
        if row.equal(old[slot]):
            raise NotYet(f"{head}position {position} comes back as it was before the write: which comes first, writing "
                         "or reading?")
        where = [at for at, other in enumerate(rows) if other.equal(row)]
        size = after.shape[1]
        held = f"place {where[0] % size} of block {where[0] // size}" if where else "something that is not in the cache"
        raise NotYet(f"{head}row {position} must be position {position}, at place {slot % size} of block "
                     f"{slot // size}; yours is {held}")


def batches_through(write_read: Callable) -> Callable:
    """The engine's way through its cache with a learner's ``write_read``, one sequence after the other."""
    def batches(self, layer, k, v):
        row = 0
        for s in self.segments:
            rows, keys = slice(row, row + s.count), paged.visible_length(s.start, s.count)
            both = [write_read(cache[layer], list(s.block_ids), s.start, new[rows]).transpose(0, 1)[None]
                    for cache, new in ((self.cache.k_cache, k), (self.cache.v_cache, v))]
            yield AttentionBatch(rows, *both, paged.causal_mask(torch.arange(s.start, s.start + s.count)[None], keys))
            row += s.count

    return batches


@exercise("my_key", "05", takes="parent, ids",
          agreed="equal beginnings share a block, nothing else does; on {ranks} all points agree with Hugging Face")
def my_key(mine: Mine, setting: Setting):
    """Pairs of chains that may not share a block; then prompts that share blocks in the engine."""
    def chain(*blocks):
        key = b""
        for ids in blocks:
            before, key = key, mine(key, list(ids))
            _usable(key, before)
        return key

    a, b, c = [7, 300, 9], [2, 5, 11], [40, 41, 42]
    if chain(a, b) != chain(a, b):
        raise NotYet("the same tokens behind the same beginning get another key the second time: nothing would ever be "
                     "found again")
    for one, other, sentence in (
            ([a], [b], "blocks {} and {} get the same key: which of their tokens does it look at?"),
            ([a], [[7, 300, 10]], "blocks {} and {} get the same key: does it look at the last token?"),
            ([a], [[8, 300, 9]], "blocks {} and {} get the same key: does it look at the first token?"),
            ([a], [[7, 301, 9]], "blocks {} and {} get the same key: does it look at the tokens in between?"),
            ([a], [[7, 300 - 256, 9]], "blocks {} and {} get the same key; token ids do not fit into one byte"),
            ([a], [[7, 300 + 65536, 9]], "blocks {} and {} get the same key; large vocabularies do not fit into two "
             "bytes"),
            ([a], [[9, 300, 7]], "blocks {} and {} get the same key: does the order of the tokens count?"),
            ([[*a, 4]], [[7, 301, 8, 4]], "blocks {} and {} get the same key: does it look at each token, or at a "
                                          "sum?"),
            ([[1, 23, 4]], [[12, 3, 4]], "blocks {} and {} get the same key: where does one number end?"),
            ([[*a, *b]], [[*a, *b[:2], 12]], "blocks of 6, {} and {}, get the same key: is a block size in your code?"),
            ([a[:2]], [[*a[:2], 0]], "a part of a block, {}, gets the key of a full one, {}: is something filled up?"),
            ([a, c], [b, c],
             "{} behind {} and behind {} get the same key. Keys and values depend on all that comes before: "
             "who tells the key of it?"),
            ([a, b, c], [b, a, c], "{} behind {} and behind {} get the same key: does the order of the blocks count?"),
            ([a, c, c], [b, c, c], "{} behind {} and behind {} get the same key: is the parent's parent forgotten?")):
        if chain(*one) == chain(*other):
            two = [one[-1], *(" ".join(map(str, blocks[:-1])) for blocks in (one, other))]
            raise NotYet(sentence.format(*(two if len(one) > 1 else (one[-1], other[-1]))))
    keys: dict = {}
    for number in range(3000):
        other = keys.setdefault(chain(ids := [number, 5, number % 7]), ids)
        if other != ids:
            raise NotYet(f"of {number + 1} blocks two get the same key, {other} and {ids}: how many different keys can "
                         "yours have? A cache has many thousand blocks, and what collides is another text's memory")
    p, q, r, s, tail = ([first + i for i in range(4)] for first in (5, 9, 13, 17, 21))
    setting.align(Patch("tplab.cache.table.block_key", mine.function), decode=True, one_by_one=True, new_tokens=2,
                  prompts=[p + q + tail, r + s + tail, r + q + tail, p + q + tail])


def _usable(key, before) -> None:
    if key is None:
        raise NotYet("it returns nothing (is a return missing?); a key must come back")
    if isinstance(key, torch.Tensor):
        raise NotYet("it returns a tensor. A dict looks a tensor up by where it lies in memory: two equal ones are two "
                     "keys, and nothing would ever be found again")
    try:
        hash(key)
    except TypeError:
        raise NotYet(f"it returns {kind(key)}, which cannot be looked up in a dict; a key must be hashable") from None
    if key == before:
        raise NotYet("the key is its parent's: every block of the sequence would be the same one")
