"""Notebook 10: what a decode step reads, and what meetings add to it."""

from collections.abc import Mapping
from types import SimpleNamespace

from tplab.bench.amounts import Part, step_amount
from tplab.lesson.attempt import Attempt, NotYet, one_number, saying
from tplab.lesson.verdict import Setting, exercise
from tplab.model.dtypes import parse_dtype
from tplab.shard import ShardPlan

_SMALL = 0.01  # norms, biases and one row of the embedding are less, and nobody has to count them


def decode_bytes(config, shard, context: int, itemsize: int) -> int:
    """What the exercise asks for: every matrix of the rank once, and the keys and values of ``context`` tokens."""
    h, d, q, kv = config.hidden_size, config.head_dim, len(shard.q_heads), len(shard.kv_heads)
    layer = h * (2 * q + 2 * kv) * d + 3 * h * len(shard.mlp) + context * 2 * kv * d
    return (config.num_layers * layer + h * len(shard.vocab)) * itemsize


def step_seconds(rank_bytes, bandwidth: float, num_layers: int, latency: float) -> float:
    """What the exercise asks for: the slowest rank's bytes, then the meetings, if there is anybody to meet."""
    meetings = 2 * num_layers + 2 if len(rank_bytes) > 1 else 0
    return max(rank_bytes) / bandwidth + meetings * latency


@exercise("my_decode_bytes", "10", takes="config, shard, context, itemsize", right=decode_bytes,
          agreed="every matrix of the rank once, and its cache")
def my_decode_bytes(attempt: Attempt, setting: Setting):
    """Sizes of which no two are alike, heads that do and do not divide; then the notebook's model on its ranks."""
    for heads, kv, itemsize, context in ((8, 2, 4, 3000), (9, 3, 2, 500)):
        config = SimpleNamespace(hidden_size=1000, head_dim=100, num_heads=heads, num_kv_heads=kv, num_layers=10,
                                 intermediate_size=3000, vocab_size=5000, experts=None)
        for shard in ShardPlan.from_config(config, 2).ranks:
            have = f"{heads} query and {kv} KV heads over 2 ranks, rank {shard.rank}, {context} tokens"
            _examine_bytes(attempt(config, shard, context, itemsize), config, shard, context, itemsize, have)
    config, dtype = setting.checkpoint.config, parse_dtype(setting.dtype)
    plan = ShardPlan.from_config(config, setting.tensor_parallel_size)
    for shard in plan.ranks:
        have = f"{setting.checkpoint.name} on {len(plan.ranks)} ranks, rank {shard.rank}, 100 tokens"
        found = attempt(config, shard, 100, dtype.itemsize)
        _examine_bytes(found, config, shard, 100, dtype.itemsize, have)
    counted = sum(amount.bytes(dtype) for amount in step_amount(config, plan, 0, [Part(99, 1)], 1, dtype))
    return f"rank 0 of {len(plan.ranks)} reads {counted / 1e6:,.1f} MB for each token"


def _examine_bytes(found, config, shard, context: int, itemsize: int, have: str) -> None:
    h, d = config.hidden_size, config.head_dim
    q, kv, columns, layers = len(shard.q_heads), len(shard.kv_heads), len(shard.mlp), config.num_layers
    right, cache = decode_bytes(config, shard, context, itemsize), layers * context * 2 * kv * d * itemsize
    head, weights = h * len(shard.vocab) * itemsize, right - cache
    whole = SimpleNamespace(q_heads=range(config.num_heads), kv_heads=range(config.num_kv_heads),
                            mlp=range(config.intermediate_size), vocab=range(config.vocab_size))
    everything = decode_bytes(config, whole, context, itemsize)
    _name(found, right, {
        "those are numbers; a number of this dtype has bytes of its own": right / itemsize, "those are bits": right * 8,
        "the cache is counted in numbers, the weights in bytes": weights + cache / itemsize,
        "the weights are counted in numbers, the cache in bytes": weights / itemsize + cache,
        "that is what all ranks hold together; what does this shard hold?": everything,
        "that is an even part of the whole; do all ranks hold as much?": everything / 2,
        "the cache is missing: attention reads keys and values too": weights,
        "the cache alone: every weight is read for every token": cache,
        "keys or values: attention reads both": right - cache / 2,
        "the cache holds KV heads; the query heads share them": weights + layers * context * 2 * q * d * itemsize,
        "the cache of one layer: each layer has its own": weights + cache / layers,
        "the LM head is missing: it is read for every token": right - head,
        "the embedding is counted as a matrix: of it, one row is read": right + head,
        "the LM head is counted in every layer": right + (layers - 1) * head,
        "one layer: all of them are read": (weights - head) / layers + head + cache / layers,
        "up, gate and down are three matrices": right - layers * h * columns * itemsize,
        "the MLP is counted whole, as all ranks hold it together":
            right + layers * 3 * h * (config.intermediate_size - columns) * itemsize,
        "o_proj is missing: it reads the attended heads": right - layers * h * q * d * itemsize,
        "k_proj and v_proj are two matrices": right - layers * h * kv * d * itemsize,
        "a head has head_dim numbers, not hidden_size / num_heads": decode_bytes(
            SimpleNamespace(hidden_size=h, head_dim=h // config.num_heads, num_layers=layers), shard, context, itemsize)
    }, have, "bytes", f"Of them {_plainly(weights - head)} are the layers' matrices, {_plainly(cache)} the cache, "
       f"{_plainly(head)} the head")


@exercise("my_step_seconds", "10", takes="rank_bytes, bandwidth, num_layers, latency", right=step_seconds,
          agreed="the slowest rank, and every meeting")
def my_step_seconds(attempt: Attempt, setting: Setting):
    """Ranks with as much and with unlike work, and one alone; then the notebook's model on four ranks."""
    for rank_bytes in ([6e9, 6e9], [6e9, 3e9], [2e9, 4e9, 3e9], [9e9]):
        have = f"ranks that read {', '.join(f'{count / 1e9:.0f} GB' for count in rank_bytes)}, 20 layers"
        _examine_seconds(attempt(rank_bytes, 2e9, 20, 0.1), rank_bytes, 2e9, 20, 0.1, have)
    config, itemsize = setting.checkpoint.config, parse_dtype(setting.dtype).itemsize
    plan = ShardPlan.from_config(config, min(4, config.num_heads))
    rank_bytes = [decode_bytes(config, shard, 100, itemsize) for shard in plan.ranks]
    have = f"{setting.checkpoint.name} on {len(rank_bytes)} ranks"
    args = rank_bytes, 1e10, config.num_layers, 2e-5
    _examine_seconds(attempt(*args), *args, have)
    return f"{have}: {2 * config.num_layers + 2} meetings for each token"


def _examine_seconds(found, rank_bytes, bandwidth: float, layers: int, latency: float, have: str) -> None:
    size = len(rank_bytes)
    right, longest = step_seconds(rank_bytes, bandwidth, layers, latency), max(rank_bytes) / bandwidth
    meet = right - longest
    _name(found, right, {
        "ranks work at the same time; nobody reads for the others": sum(rank_bytes) / bandwidth + meet,
        "a sum waits for the slowest rank, not for the mean": sum(rank_bytes) / size / bandwidth + meet,
        "a sum waits for the slowest rank, not for the quickest": min(rank_bytes) / bandwidth + meet,
        "rank_bytes are a rank's own: they are divided already": longest / size + meet,
        "nobody meets for nothing: where is the latency?": longest, "one rank alone still reads all its bytes": 0.0,
        "who is alone meets nobody": longest + (2 * layers + 2) * latency,
        "the ranks meet more than once a step": longest + latency,
        "the layers' sums are there, and two meetings are missing: one behind the embedding, one for the best tokens":
            longest + 2 * layers * latency,
        "one meeting is missing: one stands behind the embedding, and in one the ranks compare their best tokens":
            longest + (2 * layers + 1) * latency,
        "a layer has two sums, behind attention and behind the MLP": longest + layers * latency,
        "a meeting is one for all ranks, not one for each": longest + meet * size,
        "a meeting is one for all ranks, not one for each pair": longest + meet * (size - 1),
        "nothing overlaps: the next product needs the sum": max(longest, meet),
        "bytes / (bytes per second) are seconds": max(rank_bytes) * bandwidth + meet}, have, "seconds",
        f"Of them {_plainly(longest)} are for bytes, {_plainly(meet)} for meetings")


def _name(found, right: float, mistakes: Mapping[str, float], have: str, unit: str, parts: str) -> None:
    """:class:`NotYet` with the mistake that gives this number, if one is known, unless it is right."""
    with saying(f"{have}: "):
        if abs((found := one_number(found, unit)) - right) > _SMALL * right:
            near = [why for why, wrong in mistakes.items() if abs(found - wrong) <= _SMALL * abs(wrong) / 4] or [parts]
            raise NotYet(f"it says {_plainly(found)} {unit}, {_plainly(right)} are right\n"
                         f"{near[0][0].upper()}{near[0][1:]}")


def _plainly(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.4g}"
