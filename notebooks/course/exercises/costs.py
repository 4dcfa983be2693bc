"""Notebook 10: what a decode step reads, and what collectives add to it."""

from dataclasses import replace
from types import SimpleNamespace

from course.cost.amounts import Part, step_amount
from course.judge.attempt import Attempt, NotYet, one_number, saying
from course.judge.verdict import Setting, exercise
from tplab.model.dtypes import parse_dtype
from tplab.shard import ShardPlan

_SMALL = 0.01  # norms, biases and one row of the embedding are less; who counts them has so much more at most


def decode_bytes(config, shard, context: int, itemsize: int) -> int:
    """What the exercise asks for: every matrix of the rank once, and the keys and values of ``context`` tokens."""
    h, d, q, kv = config.hidden_size, config.head_dim, len(shard.q_heads), len(shard.kv_heads)
    layer = h * (2 * q + 2 * kv) * d + 3 * h * len(shard.mlp) + context * 2 * kv * d
    return (config.num_layers * layer + h * len(shard.vocab)) * itemsize


def step_seconds(rank_bytes, bandwidth: float, num_layers: int, latency: float) -> float:
    """What the exercise asks for: the slowest rank's bytes, then the collectives, if there is another rank."""
    collectives = 2 * num_layers + 2 if len(rank_bytes) > 1 else 0
    return max(rank_bytes) / bandwidth + collectives * latency


@exercise("my_decode_bytes", "10", takes="config, shard, context, itemsize", right=decode_bytes,
          agreed="every matrix of the rank once, and its cache")
def my_decode_bytes(attempt: Attempt, setting: Setting):
    """Sizes of which no two are alike, heads that do and do not divide; then the notebook's model on its ranks."""
    for heads, kv, ranks, itemsize, context in ((8, 2, 2, 4, 3100), (14, 2, 3, 2, 500)):
        config = SimpleNamespace(hidden_size=1000, head_dim=96, num_heads=heads, num_kv_heads=kv, num_layers=11,
                                 intermediate_size=2900, vocab_size=5300, experts=None)
        for shard in ShardPlan.from_config(config, ranks).ranks:
            with saying(f"{heads} query and {kv} KV heads over {ranks} ranks, rank {shard.rank}, 11 layers, {context} "
                        f"tokens, itemsize {itemsize}: "):
                _examine_bytes(attempt, config, shard, context, itemsize)
    config, dtype = setting.checkpoint.config, parse_dtype(setting.dtype)
    plan = ShardPlan.from_config(config, setting.tensor_parallel_size)
    for shard in plan.ranks:
        with saying(f"{setting.checkpoint.name} on {len(plan.ranks)} ranks, rank {shard.rank}, 100 tokens: "):
            _examine_bytes(attempt, config, shard, 100, dtype.itemsize)
    counted = sum(amount.bytes(dtype) for amount in step_amount(config, plan, 0, [Part(99, 1)], 1, dtype))
    return f"rank 0 of {len(plan.ranks)} reads {counted / 1e6:,.1f} MB for each token"


def _examine_bytes(attempt: Attempt, config, shard, context: int, itemsize: int) -> None:
    """What is wrong in it is found by what comes of twice as much of one thing: that thing is counted wrong."""
    def twice(field: str):
        return replace(shard, **{field: range(2 * len(getattr(shard, field)))})

    def is_right(found: float) -> bool:
        return right <= found * (1 + 1e-9) and found <= (1 + _SMALL) * right

    given = config, shard, context, itemsize
    found, right = one_number(attempt(*given), "bytes"), decode_bytes(*given)
    if is_right(found):
        return
    said = f"it says {_plainly(found)} bytes, {_plainly(right)} are right\n"
    from_0 = {field: range(len(one)) for field, one in vars(shard).items() if isinstance(one, range)}
    if is_right(one_number(attempt(config, replace(shard, **from_0), context, itemsize), "bytes")):
        raise NotYet(f"{said}With ranges of the same lengths that begin at 0 it is right: is the end of one taken for "
                     "its length?")
    deep = SimpleNamespace(**vars(config) | {"head_dim": 2 * config.head_dim})
    more = {"twice the head_dim": (deep, shard, context, itemsize),
            "twice the tokens in the cache": (config, shard, 2 * context, itemsize),
            "twice the MLP columns on the rank (gate, up, down)": (config, twice("mlp"), context, itemsize),
            "twice the query heads on the rank (q, o)": (config, twice("q_heads"), context, itemsize),
            "twice the KV heads on the rank (k, v, the cache)": (config, twice("kv_heads"), context, itemsize),
            "twice the words on the rank (the head)": (config, twice("vocab"), context, itemsize)}
    grown = {what: (one_number(attempt(*args), "bytes") - found, decode_bytes(*args) - right, args[0] is config)
             for what, args in more.items()}
    wrong = {what: grows / must for what, (grows, must, alone) in grown.items()
             if abs(grows - must) > _SMALL * must and (alone or not grows)}
    if wrong:
        what, times = next(iter(wrong.items()))
        alike = [other for other in wrong if other != what and abs(wrong[other] - times) < _SMALL * times]
        parts = f"1/{1 / times:.0f}" if 0 < times < 0.6 and abs(1 / times - round(1 / times)) < 0.05 else f"{times:.4g}"
        raise NotYet(f"{said}With {what}, {_plainly(grown[what][1])} bytes are added, and yours adds " + (
            f"{_plainly(grown[what][0])}, {parts} times as many" + f"; so it is with {', with '.join(alike)}" * bool(
                alike) if times else "nothing"))
    raise NotYet(f"{said}{_plainly(abs(found - right))} bytes too {'many' if found > right else 'few'}, and what grows "
                 "with the rank's share is right")


@exercise("my_step_seconds", "10", takes="rank_bytes, bandwidth, num_layers, latency", right=step_seconds,
          agreed="the slowest rank, and every collective")
def my_step_seconds(attempt: Attempt, setting: Setting):
    """Ranks with as much and with unlike work, and one alone; then the notebook's model on four ranks."""
    for rank_bytes in ([3e9, 7e9, 1e9, 2e9], [6e9, 6e9], [9e9]):
        with saying(f"ranks that read {', '.join(f'{count / 1e9:.0f} GB' for count in rank_bytes)}, 20 layers: "):
            _examine_seconds(attempt, rank_bytes, 2e9, 20, 0.1)
    config, itemsize = setting.checkpoint.config, parse_dtype(setting.dtype).itemsize
    plan = ShardPlan.from_config(config, min(4, config.num_heads))
    rank_bytes = [decode_bytes(config, shard, 100, itemsize) for shard in plan.ranks]
    have = f"{setting.checkpoint.name} on {len(rank_bytes)} ranks: "
    with saying(have):
        _examine_seconds(attempt, rank_bytes, 1e10, config.num_layers, 2e-5)
    return f"{have}{2 * config.num_layers + 2} collectives for each token"


def _examine_seconds(attempt: Attempt, rank_bytes, bandwidth: float, layers: int, latency: float) -> None:
    """Without latency, what remains is the time for bytes; the rest are collectives."""
    size, given = len(rank_bytes), (rank_bytes, bandwidth, layers, latency)
    found, right, longest = one_number(attempt(*given), "seconds"), step_seconds(*given), max(rank_bytes) / bandwidth
    if abs(found - right) <= 1e-6 * right:
        return
    bytes_alone = one_number(attempt(rank_bytes, bandwidth, layers, 0.0), "seconds")
    collectives, wanted = (found - bytes_alone) / latency, 2 * layers + 2 if size > 1 else 0
    ways = {sum(rank_bytes) / bandwidth: "ranks work at the same time; none reads for the others",
            sum(rank_bytes) / size / bandwidth: "a sum waits for the slowest rank, not for the mean",
            **dict.fromkeys([one / bandwidth for one in rank_bytes], "a sum waits for the slowest rank"),
            longest / size: "rank_bytes are a rank's own: they are divided already",
            max(rank_bytes) * bandwidth: "bytes / (bytes per second) are seconds"}
    if found == max(longest, right - longest):
        why = ("only the longer one of both is counted, or the time for bytes is missing. Nothing overlaps: the next "
               "product needs the sum")
    elif abs(bytes_alone - longest) > 1e-6 * longest:
        near = next((f": {says}" for seconds, says in ways.items() if abs(bytes_alone - seconds) <= 1e-6 * seconds), "")
        why = f"with latency 0, it says {_plainly(bytes_alone)} where {_plainly(longest)} are right{near}"
    else:
        why = f"the latency adds {_plainly(found - bytes_alone)} seconds, as for {collectives:.4g} collectives: " + (
            f"there are {wanted}, two in a layer, behind attention and behind the MLP, one behind the embedding, one "
            "for the best tokens" if wanted else "one rank alone has none")
    raise NotYet(f"it says {_plainly(found)} seconds, {_plainly(right)} are right\n{why[0].upper()}{why[1:]}")


def _plainly(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
