"""Notebook 10: what a decode step reads, and what meetings add to it."""

from collections.abc import Mapping
from itertools import combinations, product
from types import SimpleNamespace

from tplab.bench.amounts import Part, step_amount
from tplab.lesson.attempt import Attempt, NotYet, one_number, saying
from tplab.lesson.verdict import Setting, exercise
from tplab.model.dtypes import parse_dtype
from tplab.shard import ShardPlan

_SMALL = 0.01  # norms, biases and one row of the embedding are less, and need not be counted


def decode_bytes(config, shard, context: int, itemsize: int) -> int:
    """What the exercise asks for: every matrix of the rank once, and the keys and values of ``context`` tokens."""
    h, d, q, kv = config.hidden_size, config.head_dim, len(shard.q_heads), len(shard.kv_heads)
    layer = h * (2 * q + 2 * kv) * d + 3 * h * len(shard.mlp) + context * 2 * kv * d
    return (config.num_layers * layer + h * len(shard.vocab)) * itemsize


def step_seconds(rank_bytes, bandwidth: float, num_layers: int, latency: float) -> float:
    """What the exercise asks for: the slowest rank's bytes, then the meetings, if there is another rank."""
    meetings = 2 * num_layers + 2 if len(rank_bytes) > 1 else 0
    return max(rank_bytes) / bandwidth + meetings * latency


@exercise("my_decode_bytes", "10", takes="config, shard, context, itemsize", right=decode_bytes,
          agreed="every matrix of the rank once, and its cache")
def my_decode_bytes(attempt: Attempt, setting: Setting):
    """Sizes of which no two are alike, heads that do and do not divide; then the notebook's model on its ranks."""
    for heads, kv, itemsize, context in ((8, 2, 4, 3100), (9, 3, 2, 500)):
        config = SimpleNamespace(hidden_size=1000, head_dim=96, num_heads=heads, num_kv_heads=kv, num_layers=11,
                                 intermediate_size=2900, vocab_size=5300, experts=None)
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
    h, d, layers = config.hidden_size, config.head_dim, config.num_layers
    q, kv, columns = len(shard.q_heads), len(shard.kv_heads), len(shard.mlp)
    right = decode_bytes(config, shard, context, itemsize)
    whole = SimpleNamespace(q_heads=range(config.num_heads), kv_heads=range(config.num_kv_heads),
                            mlp=range(config.intermediate_size), vocab=range(config.vocab_size))
    everything = decode_bytes(config, whole, context, itemsize)
    numbers = {"q_proj": layers * h * q * d, "k_proj with v_proj": 2 * layers * h * kv * d,
               "o_proj": layers * q * d * h, "the MLP": 3 * layers * h * columns,
               "the cache": layers * context * 2 * kv * d, "the head": h * len(shard.vocab)}
    _name(found, right, {
        "that is what all ranks hold together; what does this shard hold?": everything,
        "that is an even part of the whole; do all ranks hold as much?": everything / 2,
        "the cache alone: every weight is read for every token": numbers["the cache"] * itemsize,
        "one layer: all of them are read": (right - (head := h * len(shard.vocab) * itemsize)) / layers + head,
        "the weights are counted in numbers, the cache in bytes":
            right / itemsize + numbers["the cache"] * (itemsize - 1),
        "a head has head_dim numbers, not hidden_size / num_heads": decode_bytes(
            SimpleNamespace(hidden_size=h, head_dim=h // config.num_heads, num_layers=layers), shard, context, itemsize)
    }, {name: count * itemsize for name, count in numbers.items()}, {
        "num_layers": layers, "num_layers - 1": layers - 1, "itemsize": itemsize, "bits of a byte": 8,
        "hidden_size": h, "head_dim": d,
        "query heads here": q, "KV heads here": kv, "MLP columns here": columns,
        "query heads / KV heads": q / kv, "context": context, "all heads / heads here": config.num_heads / q,
        "all MLP columns / columns here": config.intermediate_size / columns,
        "all words / words here": config.vocab_size / len(shard.vocab)}, have, "bytes")


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
        "ranks work at the same time; none reads for the others": sum(rank_bytes) / bandwidth + meet,
        "a sum waits for the slowest rank, not for the mean": sum(rank_bytes) / size / bandwidth + meet,
        "a sum waits for the slowest rank, not for the quickest": min(rank_bytes) / bandwidth + meet,
        "rank_bytes are a rank's own: they are divided already": longest / size + meet,
        "one rank alone meets no other": longest + (2 * layers + 2) * latency,
        "only the longer one of both is counted, or the time for bytes is missing. Nothing overlaps: the next product "
        "needs the sum": max(longest, meet),
        "bytes / (bytes per second) are seconds": max(rank_bytes) * bandwidth + meet,
        **{f"that is {longest:.4g} s for bytes and {n} meetings. There are {2 * layers + 2}: two in a layer, behind "
           "attention and behind the MLP, one behind the embedding, one for the best tokens": longest + n * latency
           for n in range(8 * layers) if size > 1}},
        {"the time for bytes": longest, "the time for meetings": meet}, {
            "num_layers": layers, "ranks": size, "ranks - 1": size - 1, "bits of a byte": 8}, have, "seconds")


def _name(found, right: float, mistakes: Mapping[str, float], terms: Mapping[str, float], named: Mapping[str, float],
          have: str, unit: str) -> None:
    """:class:`NotYet` with the mistake that gives this number, if one is known, unless it is right."""
    with saying(f"{have}: "):
        if abs((found := one_number(found, unit)) - right) > _SMALL * right:
            near = [why for why, wrong in mistakes.items() if abs(found - wrong) <= 1e-4 * abs(wrong)]
            why = near[0] if near else _counted(found, terms, named) or "Of them " + ", ".join(
                f"{_plainly(many)} are for {name}" for name, many in terms.items())
            raise NotYet(f"it says {_plainly(found)} {unit}, {_plainly(right)} are right\n{why[0].upper()}{why[1:]}")


def _counted(found: float, terms: Mapping[str, float], named: Mapping[str, float]) -> str:
    """That one of the terms, all of them, or two of them count another number of times than once, if that gives just
    this number, and nothing else as simple does. ``named``: numbers that may be such a factor, or its inverse."""
    few = {-1.0, 0.0, 0.25, 1 / 3, 0.5, 2 / 3, 4 / 3, 1.5, 2.0, 3.0, 4.0}
    ratios = {a / b: f" ({one} / {other})" for one, a in named.items() for other, b in named.items() if a and b}
    names = ratios | {number: f" ({name})" for name, number in named.items()} | {
        1 / number: f" (1 / {name})" for name, number in named.items() if number}
    total, order = sum(terms.values()), [*terms]
    runs = {"all of it": total} | {f"all from {order[a]} to {order[b]}": sum([*terms.values()][a:b + 1])
                                   for a, b in combinations(range(len(order)), 2) if b - a < len(order) - 1}
    for counted, some, factors in ((terms, 1, few), (runs, 1, few), (terms | runs, 1, names.keys() - {1.0}),
                                   (terms, 2, few)):
        fits = {}
        for changed in combinations(counted, some):
            for times in product(factors, repeat=some):
                more = sum((f - 1) * counted[name] for f, name in zip(times, changed))
                if abs(total + more - found) <= 1e-7 * abs(found):
                    fits[changed, times] = " and ".join(
                        f"{name} counts {f:.4g} times{'' if f in few else names[f]}" for f, name in zip(times, changed))
        if fits:
            return f"It fits if {' or if '.join(fits.values())}" if len(fits) < 4 else ""
    return ""


def _plainly(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e15 else f"{value:.4g}"
