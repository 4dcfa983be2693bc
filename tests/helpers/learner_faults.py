"""Bugs in the text of the learner's engine, and what the check is to say about each."""

from pathlib import Path
from typing import NamedTuple

HEALTHY = Path(__file__).with_name("learner.py").read_text()


class Fault(NamedTuple):
    """``(old, new)`` in the text; a regular expression for the diagnosis; the checkpoint's form."""

    edits: tuple[tuple[str, str], ...]
    said: str
    form: str = "qwen2"
    hidden: str | None = None  # why bfloat16 cannot show it


def fault(*edits, said, **more):
    return Fault(tuple(zip(edits[::2], edits[1::2], strict=True)), said, **more)


def source(*names: str, without_points: bool = False) -> str:
    """The engine's text with some faults in it; ``without_points``: with nothing but the modules watched."""
    text = HEALTHY
    for old, new in (edit for name in names for edit in FAULTS[name].edits):
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in the learner's engine")
        text = text.replace(old, new)
    if without_points:
        text = "".join(line for line in text.splitlines(True) if "rec.tensor(" not in line)
    return text


ROTATED = """    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
"""
MASK = "torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))"
REDUCE_O = ".flatten(1))\n        dist.all_reduce(out)\n"
REDUCE_DOWN = "self.up(x))\n        dist.all_reduce(out)\n"
CHUNK = "positions = torch.arange(done, done + len(step))"
SUMMED = "        x = x + self.attn(self.norm1(x), positions)\n        return x + self.mlp(self.norm2(x))\n"

FAULTS = {
    # Cut wrongly.
    "q, k, v cut along dim 1": fault(
        'w[f"{at}.{x}_proj.weight"][rows[x]] for',
        'w[f"{at}.{x}_proj.weight"].reshape(config["hidden_size"], -1)[:, rows[x]].T for', said="shard_dim1"),
    "every rank has rank 0's heads": fault(
        "q = range(rank * heads // size, (rank + 1) * heads // size)", "q = range(heads // size)",
        said="shard_of_another_rank"),
    "o_proj's columns of another rank": fault(
        'o_proj.weight"][:, self.rows(q)]', 'o_proj.weight"].roll(len(q) * self.dim, 1)[:, self.rows(q)]',
        said="shard_of_another_rank"),
    "down_proj's columns of another rank": fault(
        'down_proj.weight"].tensor_split(size, 1)[rank]', 'down_proj.weight"].tensor_split(size, 1)[rank - 1]',
        said="shard_of_another_rank", form="even"),
    "gate's rows in turns, up's in blocks": fault(
        'gate_proj.weight"].tensor_split(size)[rank]', 'gate_proj.weight"][rank::size]',
        said="mlp_columns|MLP columns", form="even"),
    "KV heads cut for rank 0 on all": fault(
        '"k": self.rows(kv), "v": self.rows(kv)', '"k": self.rows(range(len(kv))), "v": self.rows(range(len(kv)))',
        said="kv_first_rows|shard_of_another_rank"),
    "head cut, joined in reverse": fault(
        "torch.cat(parts, -1)", "torch.cat(parts[::-1], -1)", said="in another order"),
    "head cut, not joined": fault(
        "torch.cat(parts, -1)", "torch.cat([logits] * self.size, -1)", said="in another order"),
    # Sums.
    "attention not reduced": fault(REDUCE_O, REDUCE_O.splitlines()[0] + "\n", said="all_reduce_(missing|dropped)"),
    "MLP not reduced": fault(REDUCE_DOWN, REDUCE_DOWN.splitlines()[0] + "\n", said="all_reduce_(missing|dropped)"),
    "attention averaged": fault(REDUCE_O, REDUCE_O + "        out /= self.size\n", said="all_reduce_average"),
    "MLP reduced twice": fault(REDUCE_DOWN, REDUCE_DOWN + "        dist.all_reduce(out)\n",
                               said="all_reduce_twice"),
    "o_proj's bias on every rank": fault(" if rank == 0 else None", "", said="row_bias_everywhere", form="biases"),
    "o_proj's bias nowhere": fault(" if rank == 0 else None", " if rank < 0 else None", said="bias_missing",
                                   form="biases"),
    # RoPE.
    "RoPE in pairs": fault(ROTATED, """    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[..., :dim // 2], sin[..., :dim // 2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
""", said="rope_pairs"),
    "theta 10000": fault('config["rope_parameters"]["rope_theta"]', "10000.0", said="rope_default_theta|rope_theta"),
    "theta 500000": fault('config["rope_parameters"]["rope_theta"]', "500000.0", said="rope_theta"),
    "keys not rotated": fault("rotate(q, positions, self.theta), rotate(k, positions, self.theta)",
                              "rotate(q, positions, self.theta), k", said="rope_(missing|swallowed)"),
    "rotated the other way": fault("torch.cat([-b, a], -1)", "torch.cat([b, -a], -1)", said="rope_direction"),
    "decode position one too far": fault(
        CHUNK, CHUNK + " + (done >= len(prompt))", said="decode_position_off_by_one|rope_positions"),
    "decode position one too far inside": fault(
        "q, k = rotate(q, positions", "positions = positions + (len(q) == 1)\n        q, k = rotate(q, positions",
        said="decode_position_off_by_one"),
    "each chunk counts from 0": fault(
        "q, k = rotate(q, positions", "positions = positions - positions[0]\n        q, k = rotate(q, positions",
        said="rope_positions"),
    # Attention.
    "no mask": fault(MASK, "torch.ones(len(q), len(k), dtype=torch.bool)", said="no_mask"),
    "no mask in a later chunk": fault(
        MASK, MASK + "\n        mask = mask | (len(k) > len(q))", said="no_mask"),
    "mask without the past's offset": fault(MASK, "torch.ones(len(q), len(k), dtype=torch.bool).tril()",
                                            said="mask_without_past"),
    "mask's diagonal one off": fault("tril(len(k) - len(q))", "tril(len(k) - len(q) + 1)", said="mask_off_by_one"),
    "scores not scaled": fault(" * self.dim ** -0.5", "", said="softmax_scale"),
    "scaled by the model's width": fault("self.dim ** -0.5", "x.shape[-1] ** -0.5", said="softmax_scale"),
    "softmax over the queries": fault(".softmax(-1, dtype", ".softmax(-2, dtype",
                                      said="softmax_dim"),
    "KV by modulo": fault("[head // self.group - kv[0] for head in q]", "[head % len(kv) for head in q]",
                          said="query_to_kv|repeated_kv_stored", form="even"),
    "a decoded token is not kept": fault(
        "self.past = k, v\n", "self.past = (k, v) if len(q) > 1 else self.past or (k, v)\n",
        said="cache_rows_lost"),
    "the last row is overwritten": fault(
        "k, v = torch.cat([self.past[0], k]), torch.cat([self.past[1], v])",
        "k, v = (torch.cat([past[:-1], past[:1], x]) for past, x in zip(self.past, (k, v)))",
        said="cache_row_stale"),
    "the cache is not read": fault("if self.past is not None:", "if False:", said="cache_not_read"),
    # Norms, MLP, residuals.
    "epsilon 1e-6": fault('f"model.layers.{layer}", config["rms_norm_eps"]', 'f"model.layers.{layer}", 1e-6',
                          said="norm_epsilon", form="eps", hidden="1e-3 of the scale"),
    "1 + weight": fault("return self.weight * wide", "return (1 + self.weight) * wide", said="norm_plus_one"),
    "no mean square": fault("wide.pow(2).mean(-1, keepdim=True) + self.eps", "wide.var(-1, keepdim=True) + self.eps",
                            said="norm_by_deviation"),
    "norms exchanged": fault('w[f"{at}.input_layernorm.weight"]', 'w[f"{at}.post_attention_layernorm.weight"]',
                             said="norm_weight_exchanged"),
    "gate and up exchanged": fault("silu(self.gate(x)) * self.up(x)", "silu(self.up(x)) * self.gate(x)",
                                   said="gate_up_order"),
    "gelu": fault("silu(self.gate(x))", "nn.functional.gelu(self.gate(x))", said="wrong_activation"),
    "MLP without its norm": fault("self.mlp(self.norm2(x))", "self.mlp(x)",
                                  said="norm_(skipped|missing)"),
    "attention and MLP side by side": fault(
        SUMMED, "        return x + self.attn(self.norm1(x), positions) + self.mlp(self.norm2(x))\n",
        said="parallel_sublayers|norm_wrong_input"),
    "residual behind the norm": fault(
        SUMMED, "        y = self.norm1(x)\n        x = y + self.attn(y, positions)\n"
        "        return x + self.mlp(self.norm2(x))\n", said="residual"),
    # Loading and ends.
    "layer index off by one": fault('at = f"model.layers.{layer}.self_attn"',
                                    'at = f"model.layers.{max(layer - 1, 0)}.self_attn"', said="wrong_layer"),
    "last layer left out": fault("for block in self.blocks:", "for block in self.blocks[:-1]:",
                                 said="sublayer_missing|layer_left_out"),
    "no final norm": fault("self.head(self.norm(x))", "self.head(x)", said="norm_(skipped|missing)"),
    "tied head ignored": fault('w["model.embed_tokens.weight"] if config["tie_word_embeddings"]',
                               'torch.randn_like(w["model.embed_tokens.weight"]) if config["tie_word_embeddings"]',
                               said="head_random|tie_ignored|weight_not_loaded", form="tied"),
    "bias of q, k, v left out": fault("linear(weight[x], bias[x])", "linear(weight[x])", said="bias_missing"),
    "embeddings scaled": fault("x = self.embed(ids)\n", "x = self.embed(ids) * 48 ** 0.5\n",
                               said="embedding_scale"),
    "token ids one off": fault("x = self.embed(ids)\n", "x = self.embed(ids + 1)\n", said="ids_shifted|token|embed"),
    "q in bfloat16": fault("q, k = rotate(q, positions",
                           "q = q.bfloat16().to(q.dtype)\n        q, k = rotate(q, positions",
                           said="low_precision", hidden="it is bfloat16"),
}

TWO = [("attention not reduced", "gelu"), ("RoPE in pairs", "MLP reduced twice"), ("theta 10000", "no final norm"),
       ("scores not scaled", "gate and up exchanged"), ("bias of q, k, v left out", "no mask"),
       ("1 + weight", "q, k, v cut along dim 1"), ("MLP not reduced", "attention averaged"),
       ("decode position one too far inside", "head cut, joined in reverse")]
