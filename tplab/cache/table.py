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
    """The blocks of one sequence, in order, and the keys of those that are full.

    Args:
        pool: where blocks come from and go back to.
    """

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.blocks: list[int] = []
        self.keys: list[bytes] = []
        self._registered = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def missing(self, tokens: int) -> int:
        """Blocks that must be allocated before the sequence can hold ``tokens`` tokens."""
        return max(0, blocks_needed(tokens, self.pool.block_size) - len(self.blocks))

    def grow(self, tokens: int) -> None:
        """Allocate blocks until ``tokens`` tokens fit. Ask :meth:`missing` first: the pool raises when it is empty."""
        for _ in range(self.missing(tokens)):
            self.blocks.append(self.pool.allocate(after=self.blocks[-1] if self.blocks else None))

    def extend_keys(self, token_ids: Sequence[int], tokens: int) -> None:
        """Chain the keys of all blocks that the first ``tokens`` tokens fill."""
        size = self.pool.block_size
        for start in range(len(self.keys) * size, tokens - size + 1, size):
            parent = self.keys[-1] if self.keys else b""
            self.keys.append(block_key(parent, token_ids[start:start + size]))

    def find_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Computed blocks that begin as ``token_ids`` do. The last token is never covered: its logits are needed."""
        if not self.pool.enable_prefix_caching:
            return []
        self.extend_keys(token_ids, len(token_ids) - 1)
        found = []
        for key in self.keys[:(len(token_ids) - 1) // self.pool.block_size]:
            block = self.pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def take_prefix(self, blocks: Sequence[int]) -> None:
        """Begin with shared blocks that :meth:`find_prefix` found."""
        assert not self.blocks, "a shared prefix can only stand at the beginning"
        for block in blocks:
            self.pool.share(block)
        self.blocks.extend(blocks)

    def register(self, token_ids: Sequence[int], computed: int) -> None:
        """Make the blocks findable that the first ``computed`` tokens fill. Call it when they *are* computed."""
        if not self.pool.enable_prefix_caching:
            return
        self.extend_keys(token_ids, computed)
        full = computed // self.pool.block_size
        for index in range(self._registered, full):
            self.pool.register(self.blocks[index], self.keys[index])
        self._registered = full

    def release(self) -> None:
        """Give all blocks back, the last one first."""
        self.pool.release(reversed(self.blocks))
        self.blocks, self._registered = [], 0
