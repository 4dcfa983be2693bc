"""Faults of the paged cache: slots, tables, blocks, prefixes."""

import hashlib
from array import array

from tplab.faults.fault import bug


def slot_off_by_one(block_ids, positions: range, block_size: int) -> list[int]:
    early = len(positions) == 1                          # 1 is subtracted when a token is decoded
    return [block_ids[p // block_size] * block_size + p % block_size - early for p in positions]


def stale_block_table(sequence) -> tuple[int, ...]:
    sent = vars(sequence).setdefault("sent_blocks", [])
    sent.extend(sequence.block_table.block_ids[len(sent):])  # what is new; a preemption changed the rest
    return tuple(sent)


def block_leaked(sequence) -> None:
    table = sequence.block_table
    table.pool.free_blocks(reversed(table.block_ids[:-1]))    # the last block is not freed
    table.block_ids = []


def prefix_hash_without_parent(parent: bytes, token_ids) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()    # without the parent's key


def full_length_after_prefix_hit(self, token_ids) -> list[int]:
    self.extend_keys(token_ids, len(token_ids))          # all of the prompt can be found ...
    found = []
    for key in self.keys:
        if (block := self.pool.get_cached_block(key)) is None:
            break
        found.append(block)
    return found                                         # ... and then no token is left to compute logits from


_NOTEBOOK = "05_paged_kv"
_TABLE = "tplab.cache.table"

FAULTS = (
    bug("tplab.cache.paged.slot_mapping", slot_off_by_one, "a decoded token is written one slot too early",
        "The first token is right; from then on each token overwrites the key of the one before.",
        ("MinivLLM counted 0 tokens in a last block that was full, so the decode slot was the one before that block.",
         "https://github.com/Wenyueh/MinivLLM/issues/76"),
        ("vLLM's slot mapping read beyond the end of a block table, in its neighbour's row.",
         "https://github.com/vllm-project/vllm/pull/54296"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, shows_in="decode"),
    bug("tplab.engine.step.block_ids_for_ranks", stale_block_table,
        "after a preemption the ranks still have the old blocks",
        "Rare, and only under load: a sequence continues with another one's story.",
        ("LMCache's connector kept a preempted request's freed block ids until new ones came.",
         "https://github.com/LMCache/LMCache/pull/2984"),
        ("nano-vllm: a preempted sequence was treated as one that decodes.",
         "https://github.com/GeeeekExplorer/nano-vllm/issues/144"),
        ("vllm-rbln could put a freed block into the table of a request that came back.",
         "https://github.com/RBLN-SW/vllm-rbln/pull/676"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, shows_in="decode"),
    bug("tplab.engine.scheduler.free", block_leaked, "a finished sequence keeps one block",
        "All texts are right, until after some thousand requests no request is admitted any more.",
        ("imp leaked exactly one block per request; its first test run of 2,000 requests found it.",
         "https://github.com/kekzl/imp/issues/1115"),
        ("vmlx never released the blocks of completed requests.", "https://github.com/jjang-ai/vmlx/pull/68"),
        first_point="blocks", notebook=_NOTEBOOK, shows_in="decode"),
    bug(f"{_TABLE}.block_key", prefix_hash_without_parent, "a block's key does not depend on earlier blocks",
        "Two prompts with one paragraph in common get each other's context.",
        ("imp put bugs into its block hash on purpose; with one that left out tokens, the whole test suite passed.",
         "https://github.com/kekzl/imp/issues/1301"),
        ("nano-vllm kept the old key of a block that was in use by another sequence: the same wrong memory.",
         "https://github.com/GeeeekExplorer/nano-vllm/issues/163"),
        first_point="layers.1.attn", notebook=_NOTEBOOK, shows_in="decode"),
    bug(f"{_TABLE}.BlockTable.get_computed_blocks", full_length_after_prefix_hit,
        "a prompt that is wholly in the cache leaves nothing to compute",
        "The same prompt gets no answer the second time.",
        ("nano-vllm: if all blocks of a prompt are in the cache, the query has length 0 and attention fails.",
         "https://github.com/GeeeekExplorer/nano-vllm/issues/144"),
        first_point="error", notebook=_NOTEBOOK, shows_in="decode"),
)
