"""Notebook 05: positions to slots, a cache in blocks, the key of a block, and a pool of blocks."""

import random
from collections import OrderedDict

import torch

from course.judge.differ import kind
from course.judge.exercise import Example, Exercise, at
from course.judge.words import NotYet
from tplab.cache import CacheError, paged
from tplab.model.attention import AttentionBatch
from tplab.patch import Patch


def in_blocks(setting, answer):
    setting.align(decode=True, new_tokens=5, block_size=3)  # blocks of 3, so that no number of the notebook's fits


def my_write_read(cache, block_ids, start, new):
    size, flat = cache.shape[1], cache.flatten(0, 1)      # a view: [slots, kv heads, head_dim]
    slots = [block_ids[position // size] * size + position % size for position in range(start + len(new))]
    flat[slots[start:]] = new
    return flat[slots]


def caches():
    for table, size, start, count in (
            ([1, 4, 3], 4, 5, 4), ([2, 0, 5], 3, 3, 1), ([3, 0], 5, 0, 7), ([3, 1, 4, 0], 2, 3, 2)):
        dtype = torch.bfloat16 if size == 2 else torch.float32
        cache, sign = 100 + torch.arange(6.0 * size), torch.tensor([1, -1]).view(2, 1).expand(2, 3)
        for position in range(start):
            cache[table[position // size] * size + position % size] = position
        yield Example((cache.view(6, size, 1, 1) * sign).to(dtype), table, start,
                      ((start + torch.arange(count)).view(-1, 1, 1) * sign).to(dtype),
                      says=f"block table {table}, blocks of {size}, start {start} and {count} new keys")


def written(answer, cache, block_ids, start, new):
    def named(rows) -> list[str]:
        numbers = [int(row[0, 0]) if row.eq(row[0, 0] * new.new_tensor([[1], [-1]])).all() else 999 for row in rows]
        return [f"key {n}" if n < 100 else "another sequence's" if n < 999 else "other numbers" for n in numbers]

    rows, size = answer(cache, block_ids, start, new), cache.shape[1]
    slots = [block_ids[p // size] * size + p % size for p in range(start + len(new))]
    for slot in sorted(range(len(cache) * size), key=lambda slot: slot in slots):  # first what belongs to others
        yield f"afterwards, block {slot // size}, place {slot % size} holds", *named(cache.flatten(0, 1)[slot][None])
    if isinstance(rows, torch.Tensor) and rows.shape == (len(slots), *new.shape[1:]):
        yield "the rows that come back are", named(rows)
    yield "it returns", rows


def batches_through(write_read) -> list[Patch]:
    """The engine's way through its cache with a learner's ``write_read``, one sequence after the other."""
    def batches(self, layer, k, v):
        row = 0
        for s in self.segments:
            rows, keys = slice(row, row + s.count), paged.visible_length(s.start, s.count)
            both = [write_read(cache[layer], list(s.block_ids), s.start, new[rows]).transpose(0, 1)[None]
                    for cache, new in ((self.cache.k_cache, k), (self.cache.v_cache, v))]
            yield AttentionBatch(rows, *both, paged.causal_mask(torch.arange(s.start, s.start + s.count)[None], keys))
            row += s.count

    return [Patch("tplab.cache.paged.PagedContext.batches", batches)]


def my_key(parent, ids):
    return hash((parent, tuple(ids)))


def pairs():
    a, b, long, other = [7, 300, 9], [2, 5, 11], [*range(20)], [*range(19), 99]
    yield Example([a, b], [a, b], says="the same tokens behind the same beginning, twice")
    for first, second in (([a], [[8, 300, 9]]), ([a], [[9, 300, 7]]), ([a], [[7, 300 + 65536, 9]]),
                          ([[1, 23, 4]], [[12, 3, 4]]), ([[*a, 4]], [[7, 301, 8, 4]]), ([long], [other]),
                          ([a[:2]], [[*a[:2], 0]]), ([long, b], [other, b]), ([a, b, long], [b, a, long]),
                          ([long, b, b], [other, b, b])):
        yield Example(first, second, says="the last block of " + " and of ".join(map(in_few_numbers, (first, second))))
    chance = random.Random(0)
    firsts = [[chance.randrange(50 if n % 2 else 150_000) for _ in a] for n in range(1_000)]
    yield Example(*([first] for first in firsts), *([first, b] for first in firsts), says="2,000 chains of blocks")


def in_few_numbers(blocks) -> str:
    return " ".join(str(ids) if len(ids) < 9 else f"[0, 1, …, {ids[-2]}, {ids[-1]}]" for ids in blocks)


def keys(answer, *chains):
    """Which of several chains of blocks get the same key."""
    by_key = {}
    for blocks in chains:
        key = b""
        for ids in blocks:
            key = answer(key, list(ids))
        if key is None or isinstance(key, torch.Tensor):
            yield "it returns", key, "what can be found in a dict"
        try:
            twin = by_key.setdefault(key, blocks)
        except TypeError as error:
            raise NotYet(f"a key must be hashable, to be found in a dict: {error}") from None
        if twin != blocks or len(chains) == 2 and chains[0] == chains[1] and len(by_key) > 1:
            both = "they" if len(chains) == 2 else " and ".join(map(in_few_numbers, (twin, blocks)))
            yield f"{both} get the same key", twin != blocks, twin == blocks


def shared(setting, answer):
    p, q, r, s, tail = ([first + i for i in range(4)] for first in (5, 9, 13, 17, 21))
    setting.align(decode=True, one_by_one=True, new_tokens=2,
                  prompts=[p + q + tail, r + s + tail, r + q + tail, p + q + tail])


class MyPool:
    def __init__(self, num_blocks):
        self.users = [0] * num_blocks

    def allocate(self):
        if 0 not in self.users:
            return None
        block = self.users.index(0)
        self.users[block] = 1
        return block

    def share(self, block):
        self.users[block] += 1

    def release(self, block):
        if not self.users[block]:
            raise ValueError(f"no sequence uses block {block}")
        self.users[block] -= 1


def at_random(cls, num_blocks):
    """Operations beside the right counts, which say what each must do; any free block may be given."""
    pool, users, chance, done = cls(num_blocks), [0] * num_blocks, random.Random(num_blocks), [f"MyPool({num_blocks})"]
    yield "a new pool: users is", pool.users, users
    for _ in range(300):
        block = chance.randrange(num_blocks)
        what = chance.choice(["allocate", "share", "release"])
        if what == "share" and users[block] > 3:
            continue
        now = "allocate()" if what == "allocate" else f"{what}({block})"
        after = f"operation {len(done)}, after {', '.join(done[-3:])}: {now}"
        done.append(now)
        is_unused = what == "release" and not users[block]
        try:
            result, raised = getattr(pool, what)(*[block] * (what != "allocate")), None
        except Exception as error:
            if not is_unused and not isinstance(error, ValueError):
                raise
            result, raised = None, type(error).__name__
        if is_unused:
            yield f"{after}, of a block without users, raises", raised, "ValueError"
        elif what == "allocate" and 0 not in users:
            yield f"{after} while no block is free gives", f"a {raised}" if raised else result, None
        else:
            yield f"{after} raises a ValueError", raised == "ValueError", False
        if what == "allocate":
            if 0 in users:
                free = [number for number, count in enumerate(users) if not count]
                fits = type(result) is int and result in free
                yield f"{after} gives {kind(result, 'it gives')}, though the free blocks are {free}", not fits, False
                users[result] += 1
        elif not is_unused:
            users[block] += 1 if what == "share" else -1
        yield f"{after}: users is", pool.users, users
    cls(num_blocks)
    yield "a second pool is made: the users of the first are", pool.users, users


def pool_patches(cls) -> list[Patch]:
    """The engine's block pool keeps the keys, and asks a learner's ``cls`` for a block."""
    def mine_of(pool):
        if "attempt" not in vars(pool):
            pool.attempt = cls(pool.num_blocks)
        return pool.attempt

    def settle(pool):
        pool.ref_counts = list(mine_of(pool).users)
        pool._free = OrderedDict.fromkeys(block for block, count in enumerate(pool.ref_counts) if count == 0)

    def get_new_block(self, after=None):
        block = mine_of(self).allocate()
        if block is None:
            raise CacheError(f"all {self.num_blocks} blocks are in use")
        self._evict(block)
        self.times_allocated[block] += 1
        settle(self)
        return block

    def touch(self, block):
        mine_of(self).share(block)
        settle(self)

    def free_blocks(self, blocks):
        for block in blocks:
            mine_of(self).release(block)
        settle(self)

    home = "tplab.cache.blocks.BlockPool."
    return [Patch(home + method.__name__, method) for method in (get_new_block, touch, free_blocks)]


def short_of_blocks(setting, answer):
    ids = [5 + i % 40 for i in range(60)]
    prompts = [ids[:11], ids[:8] + ids[20:23], ids[30:43], ids[:11]]
    short = {"block_size": 3, "num_blocks": 9, "max_num_batched_tokens": 12, "strict": True}
    if setting.texts(prompts, 7, *setting.patches, **short) != setting.texts(prompts, 7, **short):
        raise NotYet("in the engine, short of blocks, the texts change: a block was in two hands")


EXERCISES = [
    Exercise("05", my_write_read, caches, {
        "the cache has not changed: an index with a list or a tensor, as in cache[block_ids], makes a copy": (
            "cache.flatten(0, 1) -> cache.flatten(0, 1).clone()",
            "cache.flatten(0, 1) -> cache[block_ids].flatten(0, 1) ;; "
            "block_ids[position // size] * size + position % size -> position"),
        "the keys are one slot too early: the first new one stands at position start":
            ("flat[slots[start:]] = new -> flat[[slot - 1 for slot in slots[start:]]] = new",
             "flat[slots[start:]] = new -> flat[[block_ids[(p - 1) // size] * size + (p - 1) % size "
             "for p in range(start, start + len(new))]] = new"),
        "the next slot can be in another block: ask the table for each position": (
            "flat[slots[start:]] = new -> flat[slots[start]:slots[start] + len(new)] = new",
            "block_ids[position // size] * size + position % size -> block_ids[0] * size + position"),
        "the table is not used: it says in which block a position is":
            "block_ids[position // size] * size + position % size -> position",
        "places behind the last key come back, too: there are start + tokens keys":
            "return flat[slots] -> return cache[block_ids].flatten(0, 1)",
    }, "on {ranks}, every key and value goes where the table says and comes back in order", written, batches_through,
             in_blocks, dims="position, KV head, number", within=0, writes="cache", place="writes and reads the cache"),
    Exercise("05", my_key, pairs, {
        "keys and values depend on all tokens before them, too, and the parent is not in the key":
            "(parent, tuple(ids)) -> tuple(ids)",
        "the same tokens get another key the second time, so no block would ever be found":
            "hash((parent, tuple(ids))) -> object()",
        "other token ids, or the same ones in another order, get this key, too": (
            "tuple(ids) -> sum(ids)", "tuple(ids) -> tuple(sorted(ids))", "tuple(ids) -> ''.join(map(str, ids))"),
    }, "equal beginnings share a block, nothing else does; on {ranks} all points agree with Hugging Face", keys,
             at("tplab.cache.table.block_key"), shared, place="makes the key of a full block"),
    Exercise("05", MyPool, lambda: [Example(3), Example(8)], {
        "a block that two sequences use is free after the first release: subtract one user": "-= 1 -> = 0",
        "a block that is released twice could be given to two sequences: raise a ValueError": (
            "raise ValueError -> str", "if not self.users[block] -> if False"),
        "share() of a block without users counts its first one: it was found by its key":
            "self.users[block] += 1 -> self.users[block] += bool(self.users[block])",
        "allocate() does not count the first user of its block": "self.users[block] = 1 -> pass",
        "allocate() returns no block: is a return missing?": "return block -> ",
        "a block that share() took is still in your list of free blocks":
            "* num_blocks -> * num_blocks; self.free = [*range(num_blocks)] ;; 0 not in self.users -> not self.free ;; "
            "self.users.index(0) -> self.free.pop(0) ;; self.users[block] -= 1 -> self.users[block] -= 1; "
            "self.users[block] or self.free.append(block)",
        "a released block is not given again":
            "0 not in self.users -> getattr(self, 'given', -1) + 1 == len(self.users) ;; "
            "block = self.users.index(0) -> block = self.given = getattr(self, 'given', -1) + 1",
    }, "300 random operations, and the engine with few blocks on {ranks}: all counts are right", at_random,
             pool_patches, short_of_blocks, place="allocates and frees blocks")]
