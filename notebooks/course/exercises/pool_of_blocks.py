"""Notebook 05: how many sequences use each block. The learner's pool, and how the engine runs on it."""

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from course.judge.attempt import Attempt, NotYet, Object, guarded, kind, saying
from course.judge.verdict import Setting, exercise
from tplab.cache import CacheError
from tplab.checks import quoted
from tplab.patch import Patch

OPERATIONS = 500


def _pool_patches(cls) -> list[Patch]:
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
    return [Patch(home + one.__name__, one) for one in (get_new_block, touch, free_blocks)]


@exercise("MyPool", "05", takes="num_blocks", place="hands out blocks", patches=_pool_patches,
          agreed=f"{OPERATIONS} random operations, then the engine in strict mode on {{ranks}}: every account agrees")
def my_pool(attempt: Attempt, setting: Setting):
    """At random beside a right one, then under an engine that is short of blocks."""
    for num_blocks in (3, 8):
        pool = _Watched(attempt.function, num_blocks)
        _at_random(pool, random.Random(num_blocks))
        with saying("a second pool is made, and of the first one "):
            guarded(attempt.function, num_blocks)
            pool.agree()
    ids = [5 + i % 40 for i in range(60)]
    prompts = [ids[:11], ids[:8] + ids[20:23], ids[30:43], ids[:11]]
    short = {"block_size": 3, "num_blocks": 9, "max_num_batched_tokens": 12, "strict": True}
    if setting.texts(prompts, 7, *setting.patches, **short) != setting.texts(prompts, 7, **short):
        raise NotYet("in the engine, short of blocks, the texts change: a block was in two hands")


class _Watched:
    """A learner's pool beside the right counts; every operation is checked."""

    def __init__(self, cls, num_blocks: int):
        self.pool, self.users, self.done = Object(guarded(cls, num_blocks), "MyPool"), [0] * num_blocks, []
        with saying("a new pool: "):
            self.agree()

    def allocate(self) -> int | None:
        with self._doing("allocate()" + " while no block is free" * all(self.users)):
            block = self.pool.allocate()
            if block is None and 0 in self.users:
                raise NotYet(f"it gives nothing, though no sequence uses block {self.users.index(0)}")
            if block is not None:
                self._taken(block)
        return block

    def _taken(self, block) -> None:
        if type(block) is not int or block not in range(len(self.users)):
            raise NotYet(f"it gives {kind(block)}; the number of a block must come back, 0 to {len(self.users) - 1}, "
                         "or None")
        if self.users[block]:
            raise NotYet(f"it gives block {block}, which is in use: how do you know that a block is free?")
        self.users[block] += 1

    def share(self, block: int) -> None:
        with self._doing(f"share({block})"):
            self.pool.share(block)
            self.users[block] += 1

    def release(self, block: int) -> None:
        with self._doing(f"release({block})"):
            self.pool.release(block)
            self.users[block] -= 1

    def refuses(self, block: int) -> None:
        """Releasing what no sequence uses must raise, and change nothing."""
        with self._doing(f"release({block}), which no sequence uses"):
            try:
                self.pool.made.release(block)
            except ValueError:
                return
            except Exception as error:
                raise NotYet(f"{type(error).__name__} is raised; a ValueError is asked for") from error
            raise NotYet("nothing is raised: what is given back twice would be handed out twice")

    @contextmanager
    def _doing(self, now: str) -> Iterator[None]:
        before = f", after {', '.join(self.done[-3:])}" if self.done else ""
        self.done.append(now)
        with saying(f"operation {len(self.done)}{before}: {now}: "):
            yield
            self.agree()

    def agree(self) -> None:
        attempt = self.pool.users
        if not isinstance(attempt, list) or attempt != self.users:
            raise NotYet(f"users is {quoted(attempt)}, and must be {self.users}")


def _at_random(pool: _Watched, chance: random.Random) -> None:
    for _ in range(OPERATIONS):
        used = [block for block, count in enumerate(pool.users) for _ in range(count)]
        what = chance.choice(["allocate", "allocate", "share", "release", "release", "refuses"][len(pool.users) > 3:])
        block = chance.randrange(len(pool.users))
        if what == "allocate":
            pool.allocate()
        elif what == "share" and pool.users[block] < 4:
            pool.share(block)
        elif what == "release" and used:
            pool.release(chance.choice(used))
        elif what == "refuses" and not pool.users[block]:
            pool.refuses(block)
