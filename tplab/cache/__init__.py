"""KV caches: a growing tensor per sequence, and paged blocks with prefix caching."""

from tplab.cache.blocks import BlockPool, CacheError, block_key
from tplab.cache.contiguous import ContiguousKVCache
from tplab.cache.oracle import oracle_attention
from tplab.cache.paged import PagedContext, PagedKVCache, Segment
from tplab.cache.table import BlockTable, blocks_needed, slot_mapping

__all__ = ["BlockPool", "BlockTable", "CacheError", "ContiguousKVCache", "PagedContext", "PagedKVCache", "Segment",
           "block_key", "blocks_needed", "oracle_attention", "slot_mapping"]
