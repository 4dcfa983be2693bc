"""``BlockTable``: where a sequence's tokens stand in the paged cache."""

from collections.abc import Sequence

from tplab.cache.blocks import BlockPool, block_key


def slot_mapping(block_ids: Sequence[int], positions: range, block_size: int) -> list[int]:
    """The flat slot of each position: slot ``b * block_size + o`` is place ``o`` of block ``b``.

    Args:
        block_ids: the sequence's block table.
        positions: absolute positions in the sequence.
        block_size: tokens per block.
    """
    return [block_ids[position // block_size] * block_size + position % block_size for position in positions]


def blocks_needed(tokens: int, block_size: int) -> int:
    """How many blocks hold ``tokens`` tokens."""
    return -(-tokens // block_size)


class BlockTable:
    """The blocks of one sequence, in order, and the keys of those that are full."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self._registered = 0

    def __len__(self) -> int:
        return len(self.block_ids)

    def num_blocks_to_allocate(self, tokens: int) -> int:
        """Blocks that must be allocated before the sequence can hold ``tokens`` tokens."""
        return max(0, blocks_needed(tokens, self.pool.block_size) - len(self.block_ids))

    def allocate_slots(self, tokens: int) -> None:
        """Allocate blocks until ``tokens`` tokens fit; the pool raises when it is empty."""
        for _ in range(self.num_blocks_to_allocate(tokens)):
            self.block_ids.append(self.pool.get_new_block(after=self.block_ids[-1] if self.block_ids else None))

    def extend_keys(self, token_ids: Sequence[int], tokens: int) -> None:
        """Chain the keys of all blocks that the first ``tokens`` tokens fill."""
        size = self.pool.block_size
        for start in range(len(self.keys) * size, tokens - size + 1, size):
            parent = self.keys[-1] if self.keys else b""
            self.keys.append(block_key(parent, token_ids[start:start + size]))

    def get_computed_blocks(self, token_ids: Sequence[int]) -> list[int]:
        """Computed blocks that begin as ``token_ids`` do. The last token is never covered: its logits are needed."""
        if not self.pool.enable_prefix_caching:
            return []
        self.extend_keys(token_ids, len(token_ids) - 1)
        blocks = []
        for key in self.keys[:(len(token_ids) - 1) // self.pool.block_size]:
            block = self.pool.get_cached_block(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def missing_key(self, token_ids: Sequence[int]) -> bytes | None:
        """The key of the block that stops :meth:`get_computed_blocks`: the first that is not found. None: all are."""
        computed, findable = len(self.get_computed_blocks(token_ids)), (len(token_ids) - 1) // self.pool.block_size
        return next(iter(self.keys[computed:findable]), None)

    def add_computed_blocks(self, blocks: Sequence[int]) -> None:
        """Begin with shared blocks that :meth:`get_computed_blocks` found."""
        assert not self.block_ids, "a shared prefix can only stand at the beginning"
        for block in blocks:
            self.pool.touch(block)
        self.block_ids.extend(blocks)

    def cache_blocks(self, token_ids: Sequence[int], computed: int) -> None:
        """Make the blocks findable that the first ``computed`` tokens fill. Call it when they *are* computed."""
        if not self.pool.enable_prefix_caching:
            return
        self.extend_keys(token_ids, computed)
        full = computed // self.pool.block_size
        for index in range(self._registered, full):
            self.pool.cache_full_block(self.block_ids[index], self.keys[index])
        self._registered = full

    def keys_to_cache(self, token_ids: Sequence[int], computed: int) -> list[bytes]:
        """Keys of the blocks that :meth:`cache_blocks` would make findable."""
        if not self.pool.enable_prefix_caching:
            return []
        self.extend_keys(token_ids, computed)
        return self.keys[self._registered:computed // self.pool.block_size]

    def free(self) -> None:
        """Return all blocks to the pool, the last one first."""
        self.pool.free_blocks(reversed(self.block_ids))
        self.block_ids, self._registered = [], 0
