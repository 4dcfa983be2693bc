"""Notebook 10: bytes of a decode step, and the latency of its meetings."""

from helpers.answers import Right, Wrong


def counted(layer="h * (2 * q + 2 * kv) * d + 3 * h * m", cache="2 * kv * d * context", whole="L * (layer + cache) + "
            "h * len(shard.vocab)", back="numbers * itemsize"):
    """The solution with some of its lines changed."""
    return f"""
def my_decode_bytes(config, shard, context, itemsize):
    h, d, L = config.hidden_size, config.head_dim, config.num_layers
    q, kv, m = len(shard.q_heads), len(shard.kv_heads), len(shard.mlp)
    layer = {layer}
    cache = {cache}
    numbers = {whole}
    return {back}
"""


def seconds(body):
    return f"def my_step_seconds(rank_bytes, bandwidth, num_layers, latency):\n    return {body}\n"


ANSWERS = {
    "my_decode_bytes": [
        Wrong(counted(back="numbers"), "rank 0, 3000 tokens: it says 63,500,000 bytes, 254,000,000 are right"),
        Wrong(counted(back="numbers"), "Those are numbers; a number of this dtype has bytes of its own"),
        Wrong(counted(cache="0"), "The cache is missing: attention reads keys and values too"),
        Wrong(counted(cache="kv * d * context"), "Keys or values: attention reads both"),
        Wrong(counted(cache="2 * q * d * context"), "The cache holds KV heads; the query heads share them"),
        Wrong(counted(whole="L * (layer + cache)"), "The LM head is missing: it is read for every token"),
        Wrong(counted(whole="L * (layer + cache) + 2 * h * len(shard.vocab)"),
              "The embedding is counted as a matrix: of it, one row is read"),
        Wrong(counted(whole="layer + cache + h * len(shard.vocab)"), "One layer: all of them are read"),
        Wrong(counted(whole="L * layer + cache + h * len(shard.vocab)"), "The cache of one layer: each layer has its"),
        Wrong(counted(layer="h * (2 * q + 2 * kv) * d + 2 * h * m"), "Up, gate and down are three matrices"),
        Wrong(counted(layer="h * (q + 2 * kv) * d + 3 * h * m"), "O_proj is missing"),
        Wrong(counted(layer="h * (2 * q + kv) * d + 3 * h * m"), "K_proj and v_proj are two matrices"),
        Wrong(counted().replace("config.head_dim", "config.hidden_size // config.num_heads"),
              "A head has head_dim numbers, not hidden_size / num_heads"),
        Wrong(counted().replace("len(shard.q_heads), len(shard.kv_heads), len(shard.mlp)",
                                "config.num_heads, config.num_kv_heads, config.intermediate_size")
              .replace("len(shard.vocab)", "config.vocab_size"),
              "That is what all ranks hold together; what does this shard hold?"),
        Wrong(counted(back="f'{numbers * itemsize} bytes'"),
              "0, 3000 tokens: it returns '254000000 bytes' (str); bytes must come back"),
        Wrong(counted(back="None"), "tokens: it returns nothing (is a return missing?); bytes must come back"),
        Right(counted(layer="h * (2 * q + 2 * kv) * d + 3 * h * m + 2 * h + (q + 2 * kv) * d")),
        Right(counted(back="float(numbers) * itemsize")),
    ],
    "my_step_seconds": [
        Wrong(seconds("sum(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency * (len(rank_bytes) > 1)"),
              "7.2 are right Ranks work at the same time; nobody reads for the others"),
        Wrong(seconds("sum(rank_bytes) / len(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency"),
              "7.2 are right A sum waits for the slowest rank, not for the mean"),
        Wrong(seconds("max(rank_bytes) / bandwidth"), "Nobody meets for nothing: where is the latency?"),
        Wrong(seconds("max(rank_bytes) / bandwidth + latency"), "The ranks meet more than once a step"),
        Wrong(seconds("max(rank_bytes) / bandwidth + num_layers * latency"),
              "A layer has two sums, behind attention and behind the MLP"),
        Wrong(seconds("max(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency * len(rank_bytes)"),
              "A meeting is one for all ranks, not one for each"),
        Wrong(seconds("max(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency"),
              "20 layers: it says 8.7 seconds, 4.5 are right Who is alone meets nobody"),
        Wrong(seconds("max(max(rank_bytes) / bandwidth, (2 * num_layers + 2) * latency)"),
              "Nothing overlaps: the next product needs the sum"),
        Wrong(seconds("min(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency * (len(rank_bytes) > 1)"),
              "not for the quickest"),
        Wrong(seconds("max(rank_bytes) * bandwidth"), "it says 1.2e+19 s"),
        Wrong(seconds("[count / bandwidth for count in rank_bytes]"), "seconds must come back"),
        Wrong(seconds("max(rank_bytes) / bandwidth + 2 * num_layers * latency * (len(rank_bytes) > 1)"),
              "The layers' sums are there, and two meetings are missing"),
        Wrong(seconds("max(count / bandwidth for count in rank_bytes)"
                      " + (latency * (2 * num_layers + 1) if len(rank_bytes) > 1 else 0)"),
              "One meeting is missing: one stands behind the embedding"),
        Right(seconds("max(count / bandwidth for count in rank_bytes)"
                      " + (latency * (2 * num_layers + 2) if len(rank_bytes) > 1 else 0)")),
    ],
}
