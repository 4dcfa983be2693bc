"""``BlockPool``: which blocks of the paged cache are free, which are shared, and what a full one contains.

Only numbers live here, in the parent process; the keys and values themselves are on the ranks (PagedAttention,
arXiv:2309.06180). A full block can be found again by its *key*, a hash over its tokens and its parent's key, so two
sequences that begin alike share the blocks of their common beginning.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from tplab.checks import counted, positive_int
from tplab.errors import TplabError


class CacheError(TplabError):
    """The cache is too small for what was asked, or one of its invariants does not hold."""


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name under which a full block is found again: a hash over its parent's key *and* its own tokens.

    Keys and values depend on everything before them, so the same tokens after another beginning are another block.
    ``parent`` is ``b""`` for a sequence's first block.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Hands out blocks of ``block_size`` tokens and takes them back; counts the users of each.

    A block without a user is free; its contents stay findable until it is handed out again, the longest unused
    first. So cached prefixes cost no room: every block that they occupy counts as free.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        num_blocks = positive_int("num_blocks", num_blocks, CacheError)
        self.num_blocks, self.block_size = num_blocks, positive_int("block_size", block_size, CacheError)
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.times_allocated = [0] * num_blocks
        self.keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, those with cached contents among them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence uses."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by key, in use or free."""
        return len(self._by_key)

    def is_free(self, block: int) -> bool:
        """Whether ``block`` has no user."""
        return block in self._free

    def get_new_block(self, after: int | None = None) -> int:
        """A block for one user; what it contained is forgotten. CacheError if no block is free.

        The right neighbour of ``after``, the sequence's previous block, is preferred where it is free and empty, so
        that a sequence alone in the cache lies in one piece and can be read without gathering.
        """
        if not self._free:
            raise CacheError(f"all {self.num_blocks} blocks are in use")
        if after is not None and after + 1 in self._free and self.keys[after + 1] is None:
            block = after + 1
            del self._free[block]
        else:
            block, _ = self._free.popitem(last=False)
        self._evict(block)
        self.ref_counts[block] = 1
        self.times_allocated[block] += 1
        return block

    def get_cached_block(self, key: bytes) -> int | None:
        """The block with these contents, or None. :meth:`touch` takes it."""
        return self._by_key.get(key) if self.enable_prefix_caching else None

    def touch(self, block: int) -> None:
        """Add one user to a block that was found."""
        self._free.pop(block, None)
        self.ref_counts[block] += 1

    def cache_full_block(self, block: int, key: bytes) -> None:
        """``block`` is full and computed: from now on it can be found. The first block with a key keeps it."""
        if self.enable_prefix_caching and self.keys[block] is None and key not in self._by_key:
            self.keys[block] = key
            self._by_key[key] = block

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """One user fewer for each block. Give a sequence's blocks last first: ends are evicted before beginnings."""
        for block in blocks:
            if self.ref_counts[block] < 1:
                raise CacheError(f"block {block} was released, but it had no user")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if self.keys[block] is None:
                    self._free.move_to_end(block, last=False)  # empty ones are handed out before cached ones

    def _evict(self, block: int) -> None:
        key = self.keys[block]
        if key is not None:
            del self._by_key[key]
            self.keys[block] = None

    def reset_prefix_cache(self) -> None:
        """Nothing can be found by key any more: the contents are gone."""
        for block in list(self._by_key.values()):
            self._evict(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the counts with all tables. CacheError names the first block leaked, used but free, or miscounted."""
        users = Counter(block for table in tables for block in table)
        if self.num_free + self.num_used != self.num_blocks:
            raise CacheError(f"{self.num_free} free and {self.num_used} used blocks are not {self.num_blocks}")
        for block, count in enumerate(self.ref_counts):
            if count != users[block]:
                leaked = "is leaked: it " * (count > users[block])
                raise CacheError(f"block {block} {leaked}has {counted(count, 'user')} by its count, and is in "
                                 f"{counted(users[block], 'block table')}")
            if (count == 0) != (block in self._free):
                raise CacheError(f"block {block} has {counted(count, 'user')} and is "
                                 f"{'' if block in self._free else 'not '}free")
        for key, block in self._by_key.items():
            if self.keys[block] != key:
                raise CacheError(f"block {block} is found under a key that is not its own")
