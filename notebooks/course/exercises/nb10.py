"""Notebook 10: what a decode step reads, and what collectives add to it."""

from dataclasses import replace
from types import SimpleNamespace

from course.judge.exercise import Example, Exercise
from course.judge.work import one_number
from tplab.model.dtypes import parse_dtype
from tplab.shard import ShardPlan


def my_decode_bytes(config, shard, context, itemsize):
    h, d = config.hidden_size, config.head_dim
    q, kv, columns = len(shard.q_heads), len(shard.kv_heads), len(shard.mlp)
    attention = h * (q + 2 * kv) * d + q * d * h
    cache = context * 2 * kv * d
    layer = attention + 3 * h * columns + cache
    return (config.num_layers * layer + h * len(shard.vocab)) * itemsize


def layouts():
    """Sizes of which no two are alike, heads that do and do not divide."""
    for heads, kv, ranks, itemsize, context in ((8, 2, 2, 4, 3100), (14, 2, 3, 2, 500)):
        config = SimpleNamespace(hidden_size=1000, head_dim=96, num_heads=heads, num_kv_heads=kv, num_layers=11,
                                 intermediate_size=2900, vocab_size=5300, experts=None)
        for shard in ShardPlan.from_config(config, ranks).ranks:
            yield Example(config, shard, context, itemsize, says=(
                f"{heads} query and {kv} KV heads over {ranks} ranks, rank {shard.rank}, hidden_size 1000, head_dim "
                f"96, 11 layers, {context} tokens, itemsize {itemsize}"))


def bytes_read(answer, config, shard, context, itemsize):
    """Part by part: what is gone without it. Norms, biases and one row of the embedding are less than a hundredth;
    someone who counts them is right, too."""
    def both(context, **none) -> list[float]:
        args = config, replace(shard, **none), context, itemsize
        return [one_number(count(*args), "bytes") for count in (answer, my_decode_bytes)]

    none, whole = range(0), both(context)
    for part, rest in (("shard.vocab", both(context, vocab=none)), ("shard.mlp", both(context, mlp=none)),
                       ("context", both(0)), ("", both(0, vocab=none, mlp=none))):
        counted, right = (all_of_it - less for all_of_it, less in zip(whole, rest)) if part else rest
        yield (f"the bytes that {part} adds are" if part else "the bytes of q, k, v and o alone are",
               round(right if -1e-9 * whole[1] <= counted - right <= 0.01 * whole[1] else counted), round(right))


def notebooks_model(setting):
    config, itemsize = setting.checkpoint.config, parse_dtype(setting.dtype).itemsize
    for shard in ShardPlan.from_config(config, setting.tensor_parallel_size).ranks:
        yield Example(config, shard, 100, itemsize, says=f"{setting.checkpoint.name}, rank {shard.rank}, 100 tokens")


def my_step_seconds(rank_bytes, bandwidth, num_layers, latency):
    collectives = 2 * num_layers + 2 if len(rank_bytes) > 1 else 0
    return max(rank_bytes) / bandwidth + collectives * latency


def steps():
    for rank_bytes in ([3e9, 7e9, 1e9, 2e9], [6e9, 6e9], [9e9]):
        read = ", ".join(f"{count / 1e9:.0f} GB" for count in rank_bytes)
        yield Example(rank_bytes, 2e9, 20, 0.1, says=f"ranks that read {read} at 2 GB/s, 20 layers, latency 0.1 s")


def seconds(answer, rank_bytes, bandwidth, num_layers, latency):
    reading, whole = (one_number(answer(rank_bytes, bandwidth, num_layers, each), "seconds") for each in (0.0, latency))
    yield "with latency 0, the seconds are", reading
    yield f"a latency of {latency:g} s adds, in seconds,", whole - reading


EXERCISES = [
    Exercise("10", my_decode_bytes, layouts, {
        "the cache is not counted": " + cache -> ",
        "each layer has a cache of its own": "layer = attention -> whole = cache; layer = attention ;;  + cache ->  ;; "
            "config.num_layers * layer -> config.num_layers * layer + whole",
        "head_dim is given: hidden_size // num_heads need not be it":
            "config.head_dim -> config.hidden_size // config.num_heads",
        "the cache has KV heads, and query heads are counted": "context * 2 * kv -> context * 2 * q",
        "the cache holds a key and a value of each token": "context * 2 * kv -> context * kv",
        "every layer has its own matrices and its own cache": "config.num_layers * layer -> layer",
        "these are all query heads of the model, and this rank's are shard.q_heads":
            "len(shard.q_heads) -> config.num_heads",
        "the inputs of o are the numbers of this rank's query heads": "q * d * h -> h * h",
        "o is not counted": " + q * d * h -> ",
        "k and v have a matrix each": "h * (q + 2 * kv) * d -> h * (q + kv) * d",
        "k and v have KV heads, and query heads are counted": "h * (q + 2 * kv) * d -> h * 3 * q * d",
        "of the embedding only one row is read": "h * len(shard.vocab)) -> 2 * h * len(shard.vocab))",
        "q and o are cut: they have this rank's query heads only":
            "h * (q + 2 * kv) * d + q * d * h -> h * h + h * 2 * kv * d + h * h",
        "the head is there once, and not in each layer":
            "layer = attention + -> layer = h * len(shard.vocab) + attention + ;; layer + h * len(shard.vocab)) -> "
            "layer)",
        "these are numbers, and each has itemsize bytes": " * itemsize -> ",
        "an MLP has three matrices: gate, up and down": "3 * h * columns -> 2 * h * columns",
        "shard.vocab changes nothing: is the head missing, or counted whole? Each rank reads its rows of it": (
            " + h * len(shard.vocab) -> ", "h * len(shard.vocab) -> h * config.vocab_size"),
        "only the head is counted: where are the layers?": "config.num_layers * layer -> 0",
    }, "every matrix of the rank once, and its cache", bytes_read, engine=lambda setting, answer: None,
             more=notebooks_model),
    Exercise("10", my_step_seconds, steps, {
        "a collective waits for the slowest rank, not for the mean": (
            "max(rank_bytes) -> sum(rank_bytes) / len(rank_bytes)",
            "max(rank_bytes) -> sum(rank_bytes) / len(rank_bytes) ;;  + collectives * latency -> "),
        "a collective waits for the slowest rank, not for the first": "max(rank_bytes) -> rank_bytes[0]",
        "the time to read is the bytes divided by the bandwidth": " / bandwidth + -> * bandwidth +",
        "ranks work at the same time; none reads for the others": "max(rank_bytes) -> sum(rank_bytes)",
        "there are two collectives in a layer, behind attention and behind the MLP":
            ("2 * num_layers + 2 -> num_layers + 2", "2 * num_layers + 2 -> num_layers"),
        "beside the layers there is a collective after the embedding, and one for the best tokens":
            ("2 * num_layers + 2 -> 2 * num_layers", "2 * num_layers + 2 -> 2 * num_layers + 1"),
        "the number of collectives depends on num_layers": "2 * num_layers + 2 -> 14",
        "latency is that of a collective, whatever the number of ranks":
            ("collectives * latency -> collectives * latency * (len(rank_bytes) - 1)",
             "collectives * latency -> collectives * latency * len(rank_bytes)"),
        "one rank alone has no collective": " if len(rank_bytes) > 1 else 0 -> ",
        "nothing overlaps: the next product needs the sum, so both times count":
            "max(rank_bytes) / bandwidth + collectives * latency -> "
            "max(max(rank_bytes) / bandwidth, collectives * latency)",
    }, "the slowest rank, and every collective", seconds, within=1e-6, engine=lambda setting, answer: None)]
