"""The paged KV cache: blocks, the tables of sequences, prefixes that are found again."""

from tplab.cache.blocks import BlockPool, CacheError, block_key
from tplab.cache.paged import PagedContext, PagedKVCache, Segment, rope_parts
from tplab.cache.table import BlockTable, blocks_needed, slot_mapping

__all__ = ["BlockPool", "BlockTable", "CacheError", "PagedContext", "PagedKVCache",
           "Segment", "block_key", "blocks_needed", "rope_parts", "slot_mapping"]
