"""Finds the trace point of a recorded tensor by its module's name, in the conventions of Hugging Face, vLLM, nano-vllm,
picotron, gpt-fast and Llama's own code.

A module's name gives its *role*; the role gives the trace points that go in and come out. Several modules may claim
tensors for one point (one's output is the next one's input); the strongest claim counts.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from tplab.align.check.overrides import overridden
from tplab.align.points import LAYER_POINTS, NORM_PLACES, OUTER, made_from

# role: the last part of a module's name
_IN_LAYER = {
    "q": "q_proj wq q query to_q query_proj q_linear linear_q w_query",
    "k": "k_proj wk k key to_k key_proj k_linear linear_k w_key",
    "v": "v_proj wv v value to_v value_proj v_linear linear_v w_value",
    "qkv": "qkv_proj wqkv qkv c_attn query_key_value attn_qkv in_proj w_pack to_qkv qkv_linear linear_qkv",
    "o": "o_proj wo out_proj o to_out dense o_linear linear_proj attn_out attn_proj output_proj",
    "gate": "gate_proj w1 gate w_gate gate_linear",
    "up": "up_proj w3 up w_up up_linear",
    "gate_up": "gate_up_proj w13 gate_up w1_w3 gate_up_linear linear_fc1",
    "down": "down_proj w2 down w_down down_linear linear_fc2",
    "attention": "self_attn attention attn self_attention mha att",
    "feed_forward": "mlp feed_forward ffn ff feedforward",
    "input_norm": "input_layernorm attention_norm attn_norm ln_1 ln1 norm1 norm_1 sa_norm input_norm "
                  "pre_attention_norm pre_attn_norm pre_attention_layernorm rms_1 ln_attn norm_attn",
    "post_norm": "post_attention_layernorm ffn_norm mlp_norm ln_2 ln2 norm2 norm_2 post_norm pre_mlp_layernorm "
                 "pre_ffn_norm post_attention_norm rms_2 ln_mlp norm_mlp pre_feedforward_layernorm",
    "q_norm": "q_norm q_layernorm query_norm norm_q q_ln",
    "k_norm": "k_norm k_layernorm key_norm norm_k k_ln",
    "rotary": "rotary_emb rotary rope rotary_embedding rope_emb rotary_pos_emb apply_rotary pos_embeddings",
    "act": "act_fn act activation silu_and_mul silu swiglu act_and_mul",
    "core": "core core_attention inner_attention sdpa attn_fn attention_fn attn_func flash_attn "
            "flash_attention attn_op",
    "kv_cache": "kv_cache cache",
}
_OUTSIDE = {
    "embed": "embed_tokens tok_embeddings wte embedding embeddings embed word_embeddings token_embedding "
             "token_embeddings tok_emb embed_in",
    "norm": "norm final_norm ln_f final_layernorm final_layer_norm norm_f model_norm",
    "head": "lm_head output final_proj head out_head output_layer embed_out unembed output_proj lm_proj",
    "logits": "logits_processor compute_logits",
    "rotary": _IN_LAYER["rotary"],
}
_EXPERTS = {"gate": "router", "router": "router", "gate_linear": "router", "experts": "experts",
            "block_sparse_moe": "feed_forward", "moe": "feed_forward", "sparse_moe": "feed_forward"}
_ROLES = [{leaf: role for role, leaves in table.items() for leaf in leaves.split()} for table in (_OUTSIDE, _IN_LAYER)]
TABLES = {"position_embeddings", "rotary_pos_emb", "freqs_cis", "freqs", "cos", "sin", "cos_sin", "rope_cache"}
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module"}  # parts of a name that say nothing
_MATRIX = {"linear", "proj", "base_layer", "inner", "layer", "weight", "0"}  # a parallel layer's names for its matrix
INNER = ("q", "qkv", "o", "gate", "gate_up", "down", "attention", "feed_forward")  # roles that every model has
# The strength of a claim: the smaller, the stronger. A fused output has to be split first, so the next module's input
# (DIRECT) is better.
OVERRIDE, NAMED, PRODUCER, DIRECT, FUSED, CONSUMER, WEAK = range(7)
_Flow = tuple[str, int, str, int]  # a kind of a module's tensors, the number among them, the point, the strength


def _through(before: str, point: str, entering: str = "hidden in", leaving: str = "out", direct: int = CONSUMER
             ) -> tuple[_Flow, ...]:
    return (entering, 0, before, direct), (leaving, 0, point, PRODUCER)


# role: what goes in and out
_FLOWS: dict[str, tuple[_Flow, ...]] = {
    **{role: _through("input_norm", role) for role in ("q", "k", "v", "qkv")},
    **{role: _through("post_norm", role) for role in ("gate", "up", "gate_up")},
    **{f"{part}_norm": _through(part, f"{part}_norm", "in", direct=DIRECT) for part in "qk"},
    "o": _through("attn", "o", "in", "hidden out"), "down": _through("mlp_act", "down", "in", "hidden out"),
    "attention": (("hidden in", 0, "input_norm", CONSUMER), ("hidden out", 0, "o", CONSUMER)),
    "feed_forward": (("hidden in", 0, "post_norm", CONSUMER), ("hidden out", 0, "down", CONSUMER)),
    "core": (("heads in", 0, "q_rope", CONSUMER), ("heads in", 1, "k_rope", CONSUMER), ("heads in", 2, "v", DIRECT),
             ("out", 0, "attn", PRODUCER)),
    "kv_cache": (("heads in", 0, "k_rope", CONSUMER), ("heads in", 1, "v", DIRECT)),
    "input_norm": (("hidden out", 0, "input_norm", PRODUCER),), "norm": (("hidden out", 0, "norm", PRODUCER),),
    "post_norm": (("hidden out", 0, "post_norm", PRODUCER), ("hidden out", 1, "residual", PRODUCER)),
    "attn_norm": _through("o_proj", "attn_norm", leaving="hidden out"),
    "mlp_norm": _through("mlp", "mlp_norm", leaving="hidden out"),
    "router": _through("post_norm", "router_logits"), "experts": (("hidden out", 0, "experts", PRODUCER),),
    "embed": (("hidden out", 0, "embed", PRODUCER),), "head": _through("norm", "logits"),
    "logits": _through("norm", "logits"), "act": (("in", 0, "gate", DIRECT),),
    "act of both": _through("gate_up", "mlp_act", "in")}


class Claim(NamedTuple):
    """A recorded tensor that may be a point. The point may also be ``qkv`` or ``gate_up`` (fused), ``o``, ``down`` or
    ``experts`` (a row-parallel layer's output, summed over the ranks or not)."""

    point: str
    entry: object
    strength: int


@lru_cache(1 << 16)
def split_name(name: str) -> tuple[int | None, str]:
    """A module's dotted name → its layer (None outside of the layers) and the rest of its name, ``""`` for the layer
    itself: ``"model.layers.3.mlp.up_proj"`` → ``(3, "mlp.up_proj")``."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    for i, part in enumerate(parts):
        if match := re.fullmatch(r"(?:(?:decoder_?)?(?:layers?|blocks?)_?|h_?)?(\d+)", part):
            if i or not part.isdecimal():
                return int(match.group(1)), ".".join(parts[i + 1:])
    return None, ".".join(parts)


@lru_cache(1 << 16)
def pattern_of(name: str) -> str:
    """A name with ``{i}`` in the place of its layer."""
    layer, _ = split_name(name)
    return name if layer is None else re.sub(rf"(?<=[._]){layer}(?=\.|$)|^{layer}(?=\.)", "{i}", name, count=1)


def role_of(layer: int | None, rest: str) -> str | None:
    """A module's role, by its layer and the rest of its name; None for an unknown name."""
    if layer is not None and not rest:
        return "layer"
    parts = rest.lower().split(".")
    known = _ROLES[layer is not None]
    while len(parts) > 1 and parts[-1] in _MATRIX and known.get(parts[-2]) not in (None, "attention", "feed_forward"):
        parts.pop()
    above = known.get(parts[-2]) if len(parts) > 1 else None
    if parts[-1] in ("c_proj", "proj", "dense"):
        return {"attention": "o", "feed_forward": "down"}.get(above)
    role = known.get(parts[-1])
    return "core" if role == "attention" and above == "attention" else role


def role_in(config, layer: int | None, rest: str) -> str | None:
    """The same in this model, whose norms have the checkpoint's names and whose layers may have experts."""
    *above, last = rest.lower().split(".")
    role = None
    if layer is not None and rest:
        places = {name: place for place, name in config.norms}
        role = next((point for point, place in NORM_PLACES.items() if places.get(last) == place), None)
        if config.experts and role is None:
            inner = last.startswith("shared_expert") or any(part.startswith(("experts", "shared_expert"))
                                                            for part in above)
            role = "" if inner else _EXPERTS.get(last)
            if role == "experts" and config.experts.shared_intermediate_size:
                role = ""  # the block's output has the shared expert's beside it
    return role_of(layer, rest) if role is None else role


def claims(entries, config, names: Mapping[str, str], shared: Mapping[str, tuple[int, list[int]]]
           ) -> Iterator[Claim]:
    """The claims for the tensors of one call on one rank, by their names.

    Args:
        names: overrides, as :func:`tplab.align.check.overrides.overridden` takes them.
        shared: modules that layers share, as :func:`shared_modules` returns them.
    """
    visits: dict[tuple[str, int], dict[str, list]] = {}  # a module's run → what went in and came out
    for entry in entries:
        if (point := overridden(entry, names)) is not None:
            yield Claim(point, entry, OVERRIDE)
        elif entry.kind == "tensor" and (point := _named_point(entry.name)):
            yield Claim(point, entry, NAMED)
        if entry.kind != "tensor" and entry.module_class != "Identity":  # Identity replaces an unused one
            visits.setdefault((entry.name, entry.nth), {"in": [], "out": []})[entry.kind].append(entry)
    adapted = {f"{name}.base_layer" for (name, _), sides in visits.items() if sides["out"]}  # LoRA: the outer counts
    for (name, nth), sides in visits.items():
        (layer, rest), half = split_name(name), 0
        if name in shared:
            times, layers = shared[name]
            layer, half = layers[nth // times], nth % times
            rest = rest.rpartition(".")[2]
        elif nth and role_of(layer, rest) == "rotary":
            half = nth
        elif nth:
            continue
        if name not in adapted and (layer is None or layer < config.num_layers):
            role = role_in(config, layer, rest)
            if role or layer is None and name.rpartition(".")[2] in ("", "model", "transformer", "decoder", *_WRAPPERS):
                yield from _by_role(sides, layer, role, config, half)


def shared_modules(call, config) -> dict[str, tuple[int, list[int]]]:
    """Modules that exist once and run in every layer (vLLM's rotary embedding) → how often each layer runs them, and
    the layers that do: those of the rank, or all if some were not recorded."""
    runs: dict[str, int] = {}
    for entry in call.entries:
        if entry.kind != "tensor":
            runs[entry.name] = max(runs.get(entry.name, 0), entry.nth + 1)
    places, shared = {split_name(name) for name in runs}, {}
    layers = sorted({layer for layer, rest in places if layer is not None and layer < config.num_layers})
    if not layers or any(why.startswith("layers=") for why in call.left_out):
        layers = [*range(config.num_layers)]
    for name, times in runs.items():
        layer, rest = split_name(name)
        inner = role_of(0, rest.rpartition(".")[2]) in ("rotary", "act", "core", "kv_cache")
        alone = layer is None or layer == 0 and len(layers) > 1 and (1, rest) not in places
        if inner and alone and times % len(layers) == 0 and (times > 1 or layer is None):
            shared[name] = times // len(layers), layers
    return shared


def _named_point(name: str) -> str | None:
    layer, rest = split_name(name)
    point = rest.rpartition(".")[2]
    if layer is None:
        return point if point in OUTER else None
    return f"layers.{layer}.{point}" if point in (*LAYER_POINTS, "qkv", "gate_up") else None


def _by_role(sides: dict[str, list], layer: int | None, role: str | None, config, half: int) -> Iterator[Claim]:
    """``role`` None: the model itself."""
    for side in ("in", "out"):
        sides[side] = [entry for entry in sides[side] if entry.dtype.is_floating_point and len(entry.shape) > 1]
        sides[f"hidden {side}"] = [e for e in sides[side] if len(e.shape) <= 3 and e.shape[-1] == config.hidden_size]
        sides[f"heads {side}"] = [e for e in sides[side] if e.shape[-1] % config.head_dim == 0]  # or it can be them
    at = "" if role in _OUTSIDE and layer is None else f"layers.{layer}."
    before = f"layers.{(config.num_layers if layer is None else layer) - 1}."
    added = made_from(before + "output", config)[1]
    last = (before + added, before + "residual", before + "output" if layer != 0 else "embed")

    # The output of an embedding or a head is not the point itself where it is scaled or capped behind the module.
    scaled = config.embedding_multiplier != 1
    finished = config.logits_scaling != 1 or config.final_logit_softcapping is not None

    def stream(side: str, sublayer: str, residual: str, summed: str, strength: int) -> Iterator[Claim]:
        """The residual stream: one tensor, or the last sublayer's output and the stream that it will be added to."""
        if len(sides[side]) == 1:
            yield Claim(summed, sides[side][0], strength)
        elif len(sides[side]) > 1 and not sublayer.startswith("layers.-1"):
            yield Claim(sublayer, sides[side][0], strength)
            yield Claim(residual, sides[side][1], strength)
    match role:
        case "input_norm" | "norm" | "layer":
            yield from stream("hidden in", *last, CONSUMER)
        case "post_norm":
            added = made_from(at + "residual", config)[1]
            yield from stream("hidden in", at + added, last[2], at + "residual", CONSUMER)
        case "attention" if len(sides["heads in"]) >= 3 and not sides["hidden in"]:
            role = "core"
        case "act" if sides["in"] and sides["out"] and sides["in"][0].shape[-1] == 2 * sides["out"][0].shape[-1]:
            role = "act of both"
        case "rotary" if layer is not None:
            raw = ("q_norm", "k_norm") if config.qk_norm else ("q", "k")
            ins, outs = sides["heads in"], sides["heads out"]
            if len(outs) == 1:  # called for q, then for k
                ins, outs = [None] * half + ins[:1], [None] * half + outs
            for point, entry in (*zip(raw, ins), *zip(("q_rope", "k_rope"), outs)):
                if entry is not None:
                    yield Claim(at + point, entry, DIRECT)
        case None:
            for entry in sides["out"]:
                if entry.path in ("logits", "last_hidden_state", "", "0"):
                    hidden = entry in sides["hidden out"] and config.hidden_size != config.vocab_size
                    norm = hidden if entry.path in ("", "0") else entry.path != "logits"
                    yield Claim("norm" if norm else "logits", entry, CONSUMER)
    for side, number, point, strength in _FLOWS.get(role, ()):
        if len(sides[side]) > number and (config.qk_norm or role not in ("q_norm", "k_norm")) and not (
                role == "head" and point == "logits" and finished):
            yield Claim(at + point, sides[side][number], WEAK if role == "embed" and scaled else strength)
    if role == "layer":
        added = made_from(at + "output", config)[1]
        yield from stream("hidden out", at + added, at + "residual", at + "output", PRODUCER)
    elif role in ("input_norm", "norm") and len(sides["hidden out"]) > 1:
        yield Claim(last[2], sides["hidden out"][1], PRODUCER)
