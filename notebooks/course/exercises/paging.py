"""Notebook 05: positions to slots, a cache in blocks, the key of a block. The pool is in ``pool_of_blocks.py``."""

import random
from collections.abc import Callable

import torch

from course.judge.attempt import Attempt, NotYet, for_each, kind, saying, tensor, whole_numbers
from course.judge.compare import agree
from course.judge.verdict import Setting, at, exercise
from tplab.cache import paged
from tplab.checks import counted
from tplab.model.attention import AttentionBatch
from tplab.patch import Patch

# In the engine: blocks of 3, so that no number of the notebook's fits.
ENGINE = {"decode": True, "new_tokens": 5, "block_size": 3}


@exercise("my_slot_mapping", "05", takes="block_ids, positions, block_size", place="turns positions into slots",
          agreed="on {ranks}, every position that was computed agrees with Hugging Face",
          patches=at("tplab.cache.paged.slot_mapping"))
def my_slot_mapping(attempt: Attempt, setting: Setting):
    """On tables and sizes of which the notebook shows the first; then in the engine."""
    def check(case):
        table, positions, size = case
        slots = attempt(table, positions, size)
        with saying(f"block table {table}, positions {positions}, block size {size}: "):
            slots = whole_numbers(slots, "one slot per position")
            if len(slots) != len(positions):
                raise NotYet(f"for {counted(len(positions), 'position')} come {len(slots)} slots; it must be one for "
                             "each")
            right = [table[p // size] * size + p % size for p in positions]
            at_ = next((n for n, pair in enumerate(zip(slots, right)) if pair[0] != pair[1]), 0)
            first = positions[at_] // size * size  # in that block
            agree(slots, right, {}, f"position {positions[at_]} goes to slot {slots[at_]}, {_place(slots[at_], size)}, "
                  f"and belongs to {_place(right[at_], size)}: the table's entry {first // size} holds positions "
                  f"{first} to {first + size - 1}", within=1e-9)

    for_each((([4, 1, 3], range(10), 4), ([4, 1, 3], range(7, 8), 4), ([2, 5, 0, 7], range(11), 3),
              ([6, 0, 9], range(4, 12), 5)), check, lambda case: f"blocks of {case[2]}")
    setting.align(**ENGINE)


def _batches_through(write_read: Callable) -> list[Patch]:
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


@exercise("my_write_read", "05", takes="cache, block_ids, start, new", writes="cache",
          place="writes and reads the cache", patches=_batches_through,
          agreed="on {ranks}, every key and value goes where the table says and comes back in order")
def my_write_read(attempt: Attempt, setting: Setting):
    """A cache full of other readers' numbers: a chunk, one token, a first prompt, two tokens over a block's edge."""
    def check(case):
        table, size, start, count = case
        dtype = torch.bfloat16 if size == 3 else torch.float32
        cache, new = ((first * torch.arange(6.0 * rows) + 1).view(*shape, 2, 3).to(dtype) for first, rows, shape in (
            (0.125, 6 * size, (6, size)), (-1, count, (count,))))
        slots = [table[p // size] * size + p % size for p in range(start + count)]
        after = cache.clone()
        after.view(-1, 2, 3)[slots[start:]] = new
        found = attempt(cache, table, start, new)
        with saying(f"block table {table}, blocks of {size}, {start} tokens there and {count} new: "):
            _written(cache, after, attempt.given[0], table, slots, start)
            tensor(found, "tokens, kv heads, head_dim", (start + count, 2, 3), dtype)
            flat = after.flatten(0, 1)
            places = [next((at for at, other in enumerate(flat) if other.equal(row)), None) for row in found]
            wrong = next((n for n, slot in enumerate(slots) if places[n] != slot), 0)
            agree(found, flat[slots], {"what comes back was read before the new tokens were written":
                                       cache.flatten(0, 1)[slots]},
                  f"row {wrong} must be position {wrong}, at {_place(slots[wrong], size)}; yours is " + (
                      "something that is not in the cache" if places[wrong] is None else _place(places[wrong], size)),
                  within=1e-9, dims="position, KV head")

    for_each((([1, 4, 3], 4, 5, 4), ([2, 0, 5], 3, 3, 1), ([3, 0], 5, 0, 7), ([3, 1, 4, 0], 2, 3, 2)), check,
             lambda case: f"blocks of {case[1]}")
    setting.align(**ENGINE)


def _written(before, after, attempt, table: list[int], slots: list[int], start: int) -> None:
    if attempt.shape != before.shape:
        raise NotYet(f"the cache goes in as {list(before.shape)} and must stay so; yours is {list(attempt.shape)}")
    size, (old, now, right) = before.shape[1], (one.flatten(0, 1) for one in (before, attempt, after))
    changed, wrong = ((now != one).flatten(1).any(1).nonzero()[:, 0].tolist() for one in (old, right))
    if not changed:
        raise NotYet("the cache is as it was before: nothing was written, or into a copy, which an index with a list "
                     "or a tensor makes")
    new = {f"position {start + n}": right[slot] for n, slot in enumerate(slots[start:])}
    for slot in sorted(wrong, key=lambda slot: slot in slots[start:]):
        at = slots.index(slot) if slot in slots else None
        known = {"zeros": 0 * old[slot], "what was there before": old[slot], **new}
        holds = next((what for what, one in known.items() if now[slot].equal(one)), "other numbers")
        whose = (f"which is position {at}'s" if at is not None else "behind the sequence's last position"
                 if slot // size in table else "which is in none of the sequence's blocks")
        said = f"{_place(slot, size)}, {whose}, holds {holds} now"
        if at is None or at < start:
            raise NotYet(f"{said}: only the places of the new tokens are to change")
        agree(now[slot], right[slot], {said: tuple(known.values())}, said, dims="KV head", within=1e-9,
              parts={"what was there before": old[slot], "what is new": right[slot]})


def _place(slot: int, size: int) -> str:
    return f"place {slot % size} of block {slot // size}"


@exercise("my_key", "05", takes="parent, ids", place="names full blocks", patches=at("tplab.cache.table.block_key"),
          agreed="equal beginnings share a block, nothing else does; on {ranks} all points agree with Hugging Face")
def my_key(attempt: Attempt, setting: Setting):
    """Pairs of chains that may not share a block; then prompts that share blocks in the engine."""
    def chain(*blocks):
        key = b""
        for ids in blocks:
            before, key = key, attempt(key, list(ids))
            _usable(key, before)
        return key

    a, b, c, long, other_end = [7, 300, 9], [2, 5, 11], [40, 41, 42], [*range(20)], [*range(19), 99]
    if chain(a, b) != chain(a, b):
        raise NotYet("the same tokens behind the same beginning get another key the second time: nothing would ever be "
                     "found again")
    for one, other, asks in (
            *(([a], [[*a[:n], a[n] + 1, *a[n + 1:]]], f"does it look at the {name} token?")
              for n, name in enumerate(("first", "second", "last"))),
            *(([a], [[7, 300 + n, 9]], f"token ids {n} apart are two tokens, also where ids are cut to bytes")
              for n in (256, 65536, 100, 1000, 1024, 4096, 10000)),
            ([a], [[9, 300, 7]], "does the order of the tokens count?"),
            ([[*a, 4]], [[7, 301, 8, 4]], "does it look at each token, or at a sum?"),
            ([[1, 23, 4]], [[12, 3, 4]], "where does one number end?"),
            ([long], [other_end], "does it look at each of the 20 tokens?"),
            ([a[:2]], [[*a[:2], 0]], "does it see the 0 at the end?"),
            ([long, c], [other_end, c], "K and V depend on all before them: is all of the parent in the key?"),
            ([a, b, c], [b, a, c], "does the order of the blocks count?"),
            ([long, c, c], [other_end, c, c], "is the parent's parent forgotten?")):
        if chain(*one) == chain(*other):
            two = " and ".join(" ".join(map(str, blocks)) for blocks in (one, other))
            raise NotYet(f"{'the last of ' * (len(one) > 1)}blocks {two} get the same key: {asks}")
    keys, draw = {}, random.Random(0)
    for number in range(3000):
        first = [draw.randrange(150_000 if number % 2 else 50) for _ in a]
        for blocks in ([first], [first, c], [[first[0] ^ 1, *first[1:]]], [[*first[:2], first[2] ^ 1]],
                       [[first[0] ^ 65536, *first[1:]]]):
            if (other := keys.setdefault(chain(*blocks), blocks)) != blocks:
                raise NotYet(f"of {len(keys)} blocks two get the same key, the last of {other} and of {blocks}: how "
                             "many different keys can yours have?")
    p, q, r, s, tail = ([first + i for i in range(4)] for first in (5, 9, 13, 17, 21))
    setting.align(decode=True, one_by_one=True, new_tokens=2,
                  prompts=[p + q + tail, r + s + tail, r + q + tail, p + q + tail])


def _usable(key, before) -> None:
    if key is None:
        raise NotYet("it returns nothing (is a return missing?); a key must come back")
    if isinstance(key, torch.Tensor):
        raise NotYet("it returns a tensor: in a dict, two equal tensors are two keys, so none would be found again")
    try:
        hash(key)
    except TypeError:
        raise NotYet(f"it returns {kind(key)}, which cannot be looked up in a dict; a key must be hashable") from None
    if key == before:
        raise NotYet("the key is its parent's: every block of the sequence would be the same one")
