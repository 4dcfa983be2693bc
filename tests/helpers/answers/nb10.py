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
        Wrong(counted(back="numbers"), "It fits if all of it counts 0.25 times"),
        Wrong(counted(back="numbers"), "It fits if all of it counts 0.25 times"),
        Wrong(counted(cache="0"), "It fits if the cache counts 0 times"),
        Wrong(counted(cache="kv * d * context"), "It fits if the cache counts 0.5 times"),
        Wrong(counted(cache="2 * q * d * context"), "It fits if the cache counts 4 times"),
        Wrong(counted(whole="L * (layer + cache)"), "It fits if the head counts 0 times"),
        Wrong(counted(whole="L * (layer + cache) + 2 * h * len(shard.vocab)"),
              "It fits if the head counts 2 times"),
        Wrong(counted(whole="layer + cache + h * len(shard.vocab)"), "One layer: all of them are read"),
        Wrong(counted(whole="L * layer + cache + h * len(shard.vocab)"), "It fits if the cache counts 0.09091 times ("),
        Wrong(counted(layer="h * (2 * q + 2 * kv) * d + 2 * h * m"), "It fits if the MLP counts 0.6667 times"),
        Wrong(counted(layer="h * (q + 2 * kv) * d + 3 * h * m"), "It fits if q_proj counts 0 times or if o_proj count"),
        Wrong(counted(layer="h * (2 * q + kv) * d + 3 * h * m"), "It fits if k_proj with v_proj counts 0.5 times"),
        Wrong(counted().replace("config.head_dim", "config.hidden_size // config.num_heads"),
              "A head has head_dim numbers, not hidden_size / num_heads"),
        Wrong(counted().replace("len(shard.q_heads), len(shard.kv_heads), len(shard.mlp)",
                                "config.num_heads, config.num_kv_heads, config.intermediate_size")
              .replace("len(shard.vocab)", "config.vocab_size"),
              "That is what all ranks hold together; what does this shard hold?"),
        Wrong(counted(back="f'{numbers * itemsize} bytes'"),
              " 3100 tokens: it returns '270428800 bytes' (str); bytes must come back"),
        Wrong(counted(back="None"), "tokens: it returns nothing (is a return missing?); bytes must come back"),
        Right(counted(layer="h * (2 * q + 2 * kv) * d + 3 * h * m + 2 * h + (q + 2 * kv) * d")),
        Right(counted(back="float(numbers) * itemsize")),
    ],
    "my_step_seconds": [
        Wrong(seconds("sum(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency * (len(rank_bytes) > 1)"),
              ", 7.2 are right Ranks work at the same time; none reads for the others"),
        Wrong(seconds("sum(rank_bytes) / len(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency"),
              "7.2 are right A sum waits for the slowest rank, not for the mean"),
        Wrong(seconds("max(rank_bytes) / bandwidth"), "That is 3 s for bytes and 0 meetings. There are 42: two in a l"),
        Wrong(seconds("max(rank_bytes) / bandwidth + latency"), "That is 3 s for bytes and 1 meetings. There are 42:"),
        Wrong(seconds("max(rank_bytes) / bandwidth + num_layers * latency"),
              "That is 3 s for bytes and 20 meetings. There are 42: two in a layer, behind atte"),
        Wrong(seconds("max(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency * len(rank_bytes)"),
              "That is 3 s for bytes and 84 meetings. There are 42: two in a layer, behind atte"),
        Wrong(seconds("max(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency"),
              "yers: it says 8.7 seconds, 4.5 are right One rank alone meets no other"),
        Wrong(seconds("max(max(rank_bytes) / bandwidth, (2 * num_layers + 2) * latency)"),
              "Nothing overlaps: the next product needs the sum"),
        Wrong(seconds("min(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency * (len(rank_bytes) > 1)"),
              "not for the quickest"),
        Wrong(seconds("max(rank_bytes) * bandwidth"), "it says 1.2e+19 s"),
        Wrong(seconds("[count / bandwidth for count in rank_bytes]"), "seconds must come back"),
        Wrong(seconds("max(rank_bytes) / bandwidth + 2 * num_layers * latency * (len(rank_bytes) > 1)"),
              "That is 3 s for bytes and 40 meetings. There are 42: two in a layer, behind atte"),
        Wrong(seconds("max(count / bandwidth for count in rank_bytes)"
                      " + (latency * (2 * num_layers + 1) if len(rank_bytes) > 1 else 0)"),
              "That is 3 s for bytes and 41 meetings. There are 42: two in a layer, behind atte"),
        Right(seconds("max(count / bandwidth for count in rank_bytes)"
                      " + (latency * (2 * num_layers + 2) if len(rank_bytes) > 1 else 0)")),
    ],
}
