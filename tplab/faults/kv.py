"""Faults of KV heads, of the content of a cache, and of the position of a decoded token."""

from tplab.faults.fault import bug, only_if, two_ranks
from tplab.patch import Patch, original
from tplab.ranks import rank, world_size
from tplab.shard import ShardPlan
from tplab.shard.linear import MergedColumnParallelLinear

_LOAD = "tplab.shard.linear.QKVParallelLinear.load"
_ATTEND = "tplab.model.attention.TensorParallelAttention.attend_all"
_UPDATE = "tplab.engine.scheduler.Scheduler.update_from_output"


def repeated_kv_stored(self, q, k, v, context):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)   # as attention needs them
    return original(_ATTEND)(self, q, k, v, context)        # copy 1 of head 0 is stored as head 1


def first_copies_fit(cache, slots, new) -> None:
    cache[slots] = new[:, :cache.shape[1]]           # the engine's cache has no room for the copies


def kv_first_rows(self, parameter, *sources) -> None:
    q, k, v = self.ranges
    self.ranges = q, range(len(k)), range(len(v))        # the right number of rows, and always the first ones
    MergedColumnParallelLinear.load(self, parameter, *sources)
    self.ranges = q, k, v


def kv_replica_modulo(self, parameter, *sources) -> None:
    q, k, v = self.ranges
    kv_heads = self.output_sizes[1] // self.head_size
    if world_size() > kv_heads and len(k) == self.head_size:
        head = rank() % kv_heads                         # but neighbours share a head: rank // replicas
        mine = range(head * self.head_size, (head + 1) * self.head_size)
        self.ranges = q, mine, mine
    MergedColumnParallelLinear.load(self, parameter, *sources)
    self.ranges = q, k, v


def cache_ignored(self, scheduler_output, runner_output):
    advanced = original(_UPDATE)(self, scheduler_output, runner_output)
    for sequence in advanced:
        sequence.num_computed_tokens = 0                 # every step begins at the first token again
    return advanced


def decode_position_off_by_one(segment) -> range:
    first = segment.start + 1 if segment.count == 1 else segment.start    # the newest has position len - 1, not len
    return range(first, first + segment.count)


def decode_position_restarted(segment) -> range:
    return range(segment.count)                          # right for a prompt, 0 for every token after it


def _several_heads_here(config, tensor_parallel_size: int) -> str:
    if config.num_heads == config.num_kv_heads:
        return "every query head has a KV head of its own, so nothing is repeated"
    plan = ShardPlan.from_config(config, tensor_parallel_size)
    several = any(len(s.kv_heads) > 1 and len(s.q_heads) // len(s.kv_heads) > 1 for s in plan.ranks)
    return "" if several else "no rank repeats several KV heads here: all copies are the same, only the cache grows"


def _replicas(config, tensor_parallel_size: int) -> str:
    plan = ShardPlan.from_config(config, tensor_parallel_size)
    if tensor_parallel_size <= config.num_kv_heads:
        return "no KV head is on two ranks here"
    moved = [s for s in plan.ranks if len(s.kv_heads) == 1 and s.kv_heads[0] != s.rank % config.num_kv_heads]
    return "" if moved else "with this many heads and ranks either rule gives the same head"


_several_kv_heads = only_if(lambda c: c.num_kv_heads > 1, "there is one KV head, which every rank holds", two_ranks)
_NOTEBOOK = "04_gqa_cache"
_POSITIONS = "tplab.engine.runner.token_positions"

FAULTS = (
    bug(_ATTEND, repeated_kv_stored, "repeated heads are written to the cache",
        "The cache is larger by the group's size, and a query reads another group's keys.",
        ("HeadKV and SnapKV call repeat_kv before they store: a cache for query heads instead of KV heads.",
         "https://github.com/FYYFU/HeadKV/issues/3"),
        ("For months, torchtune's cache had the size of the query heads: eight times too large for grouped queries.",
         "https://github.com/meta-pytorch/torchtune/issues/38"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, needs=_several_heads_here,
        more=(Patch("tplab.cache.paged.write_cache", first_copies_fit),)),
    bug(_LOAD, kv_first_rows, "every rank takes the first KV rows",
        "Correct on one rank; on several, all query heads read the first KV heads.",
        ("picotron cuts q, k and v weights to their first rows on every rank. It has no effect there, because it "
         "initialises new weights for training afterwards.",
         "https://github.com/huggingface/picotron/blob/main/picotron/checkpoint.py"),
        first_point="layers.0.k", notebook=_NOTEBOOK, needs=_several_kv_heads),
    bug(_LOAD, kv_replica_modulo, "the replicated KV head is rank % heads instead of rank // replicas",
        "Correct until there are more ranks than KV heads; then half of the groups are exchanged.",
        ("vLLM's loader for grouped queries was wrong when tp exceeds the number of KV heads.",
         "https://github.com/vllm-project/vllm/pull/2379"),
        ("transformers had no replication: with more ranks than KV heads, a rank got half a head and failed in the "
         "forward pass.", "https://github.com/huggingface/transformers/issues/48307"),
        first_point="layers.0.k", notebook=_NOTEBOOK, needs=_replicas),
    bug(_UPDATE, cache_ignored, "every step computes the whole sequence again",
        "The text is right; each token takes longer than the one before.",
        ("nanoGPT generates like this; a cache made it eight times as fast on a CPU.",
         "https://github.com/karpathy/nanoGPT/pull/76"),
        first_point="steps", notebook=_NOTEBOOK, shows_in="decode"),
    bug(_POSITIONS, decode_position_off_by_one, "the position of a decoded token is one too large",
        "The first token is right; later, names and numbers are wrong.",
        ("nano-vllm decoded at position len(seq) instead of len(seq) - 1.",
         "https://github.com/GeeeekExplorer/nano-vllm/pull/67"),
        first_point="layers.0.q_rope", notebook=_NOTEBOOK, shows_in="decode"),
    bug(_POSITIONS, decode_position_restarted, "positions start at 0 again when decoding begins",
        "The prompt is understood, and the answer falls into a loop.",
        ("mlx-vlm gave every decoded token of Qwen3-Omni position 0, because its ids ignored the cache's offset.",
         "https://github.com/Blaizzy/mlx-vlm/issues/1983"),
        first_point="layers.0.q_rope", notebook=_NOTEBOOK, shows_in="decode"),
)
