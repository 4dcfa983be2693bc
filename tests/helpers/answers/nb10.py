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
        Wrong(counted(layer="h * (2 * q + 2 * kv) * d + 3 * h * config.intermediate_size // 2"),
              "With twice the MLP columns on the rank (gate, up, down), 63,822,000 bytes are added"),
        Wrong(counted(back="f'{numbers * itemsize} bytes'"),
              " 3100 tokens, itemsize 4: it returns '270428800 bytes' (str); bytes must come back"),
        Wrong(counted(back="None"), "itemsize 4: it returns nothing (is a return missing?); bytes must come back"),
        Right(counted(layer="h * (2 * q + 2 * kv) * d + 3 * h * m + 2 * h + (q + 2 * kv) * d")),
        Right(counted(back="float(numbers) * itemsize")),
    ],
    "my_step_seconds": [
        Wrong(seconds("sum(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency * (len(rank_bytes) > 1)"),
              "it says 6.5 where 3.5 are right: ranks work at the same time; none reads for the others"),
        Wrong(seconds("max(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency"),
              "The latency adds 4.2 seconds, as for 42 collectives: one rank alone has none"),
        Wrong(seconds("max(rank_bytes) * bandwidth"), "it says 1.4e+19 s"),
        Wrong(seconds("[count / bandwidth for count in rank_bytes]"), "seconds must come back"),
        Right(seconds("max(count / bandwidth for count in rank_bytes)"
                      " + (latency * (2 * num_layers + 2) if len(rank_bytes) > 1 else 0)")),
    ],
}
