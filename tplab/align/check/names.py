"""What a recorded tensor is, by its module's name: the conventions of Hugging Face, vLLM, nano-vllm, picotron,
gpt-fast and Llama's own code.

A module's name says its *role*; its role says which trace points go in and come out. A tensor may be claimed for the
same point by several modules (one's output is the next one's input); the strongest claim counts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tplab.align.check.overrides import overridden
from tplab.align.points import LAYER_POINTS

# role: the last part of a module's name
_IN_LAYER = {
    "q": "q_proj wq q query to_q query_proj q_linear linear_q",
    "k": "k_proj wk k key to_k key_proj k_linear linear_k",
    "v": "v_proj wv v value to_v value_proj v_linear linear_v",
    "qkv": "qkv_proj wqkv qkv c_attn query_key_value attn_qkv in_proj w_pack to_qkv qkv_linear linear_qkv",
    "o": "o_proj wo out_proj o to_out dense o_linear linear_proj attn_out attn_proj",
    "gate": "gate_proj w1 gate w_gate gate_linear",
    "up": "up_proj w3 up w_up up_linear",
    "gate_up": "gate_up_proj w13 gate_up w1_w3 gate_up_linear linear_fc1",
    "down": "down_proj w2 down w_down down_linear linear_fc2",
    "attention": "self_attn attention attn self_attention mha",
    "feed_forward": "mlp feed_forward ffn ff feedforward",
    "input_norm": "input_layernorm attention_norm attn_norm ln_1 ln1 norm1 input_norm pre_attention_norm "
                  "pre_attn_norm pre_attention_layernorm rms_1 ln_attn norm_attn",
    "post_norm": "post_attention_layernorm ffn_norm mlp_norm ln_2 ln2 norm2 post_norm pre_mlp_layernorm pre_ffn_norm "
                 "post_attention_norm rms_2 ln_mlp norm_mlp pre_feedforward_layernorm",
    "q_norm": "q_norm q_layernorm query_norm norm_q q_ln",
    "k_norm": "k_norm k_layernorm key_norm norm_k k_ln",
    "rotary": "rotary_emb rotary rope rotary_embedding rope_emb rotary_pos_emb apply_rotary pos_embeddings",
    "act": "act_fn act activation silu_and_mul silu swiglu act_and_mul",
    "core": "core_attention inner_attention sdpa attn_fn attention_fn attn_func flash_attn flash_attention attn_op",
    "kv_cache": "kv_cache cache",
}
_OUTSIDE = {
    "embed": "embed_tokens tok_embeddings wte embedding embeddings embed word_embeddings token_embedding "
             "token_embeddings tok_emb embed_in",
    "norm": "norm final_norm ln_f final_layernorm final_layer_norm norm_f model_norm",
    "head": "lm_head output final_proj head output_layer embed_out unembed output_proj lm_proj",
    "logits": "logits_processor compute_logits",
    "rotary": _IN_LAYER["rotary"],
}
_ROLES = [{leaf: role for role, leaves in table.items() for leaf in leaves.split()} for table in (_OUTSIDE, _IN_LAYER)]
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module"}  # parts of a name that say nothing
_INNER = {"linear", "proj", "base_layer", "inner", "layer", "weight", "0"}  # what a parallel layer calls its own matrix
# How strong a claim is: the smaller, the stronger. A fused output has to be split first, so what goes into the next
# module (direct) tells more.
OVERRIDE, NAMED, PRODUCER, DIRECT, FUSED, CONSUMER, EVIDENT = range(7)


@dataclass(frozen=True)
class Claim:
    """A recorded tensor is taken for a point. ``point`` may end in ``qkv``, ``gate_up`` (fused), ``o`` or ``down`` (a
    row-parallel layer's output, summed over the ranks or not)."""

    point: str
    entry: object
    strength: int


@dataclass
class Visit:
    """One run of one module: the tensors that went in and came out, in their order."""

    name: str
    nth: int
    ins: list = field(default_factory=list)
    outs: list = field(default_factory=list)


@dataclass(frozen=True)
class Sizes:
    """What tensors are recognised by."""

    hidden: int
    head_dim: int
    vocab: int
    layers: int
    qk_norm: bool


def place_of(name: str) -> tuple[int | None, str]:
    """A module's dotted name → its layer (None outside of the layers) and the rest of its name, ``""`` for the layer
    itself: ``"model.layers.3.mlp.up_proj"`` → ``(3, "mlp.up_proj")``."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    for i, part in enumerate(parts):
        if found := re.fullmatch(r"(?:(?:decoder_?)?(?:layers?|blocks?)_?|h_?)?(\d+)", part):
            if i or not part.isdecimal():
                return int(found.group(1)), ".".join(parts[i + 1:])
    return None, ".".join(parts)


def pattern_of(name: str) -> str:
    """A name with ``{i}`` in the place of its layer."""
    layer, _ = place_of(name)
    return name if layer is None else re.sub(rf"(?<=[._]){layer}(?=\.|$)|^{layer}(?=\.)", "{i}", name, count=1)


def role_of(layer: int | None, rest: str) -> str | None:
    """What a module is for, by its place; None where the conventions know no such name."""
    if layer is not None and not rest:
        return "layer"
    parts = rest.lower().split(".")
    known = _ROLES[layer is not None]
    while len(parts) > 1 and parts[-1] in _INNER and known.get(parts[-2]) not in (None, "attention", "feed_forward"):
        parts.pop()
    above = known.get(parts[-2]) if len(parts) > 1 else None
    if parts[-1] in ("c_proj", "proj", "dense"):
        return {"attention": "o", "feed_forward": "down"}.get(above)
    role = known.get(parts[-1])
    return "core" if role == "attention" and above == "attention" else role


def visits(entries) -> list[Visit]:
    """A call's entries, in their order, module run by module run; tensors recorded by hand are not among them."""
    found: dict[tuple[str, int], Visit] = {}
    for entry in entries:
        if entry.kind != "tensor":
            visit = found.setdefault((entry.name, entry.nth), Visit(entry.name, entry.nth))
            (visit.ins if entry.kind == "in" else visit.outs).append(entry)
    return list(found.values())


def claims(entries, sizes: Sizes, names: Mapping[str, str], shared: Mapping[str, int], roles: Mapping[str, str],
           points: Mapping[tuple[str, str, str], str]) -> Iterator[Claim]:
    """What the tensors of one call on one rank are by their names.

    Args:
        names: overrides, as :func:`tplab.align.check.overrides.overridden` takes them.
        shared: modules that all layers share, by name → how often each layer runs them.
        roles: what modules were found to do, by the pattern of their name.
        points: what tensors were found to equal, by their name's pattern, kind and path.
    """
    for entry in entries:
        if point := points.get((pattern_of(entry.name), entry.kind, entry.path)):
            yield Claim(point.format(i=place_of(entry.name)[0]), entry, EVIDENT)
        if (point := overridden(entry, names)) is not None:
            yield Claim(point, entry, OVERRIDE)
        elif entry.kind == "tensor" and (point := _named_point(entry.name)):
            yield Claim(point, entry, NAMED)
    found = visits(entries)
    adapted = {f"{visit.name}.base_layer" for visit in found if visit.outs}  # LoRA's: the whole is what counts
    for visit in found:
        if visit.name in adapted:
            continue
        layer, rest = place_of(visit.name)
        half = 0
        if visit.name in shared:
            layer, half = divmod(visit.nth, shared[visit.name])
            rest = rest.rpartition(".")[2]
        elif visit.nth and role_of(layer, rest) == "rotary":
            half = visit.nth
        elif visit.nth:
            continue
        if layer is None or layer < sizes.layers:
            role = roles.get(pattern_of(visit.name)) or role_of(layer, rest)
            yield from _by_role(visit, layer, role, sizes, half)


def _named_point(name: str) -> str | None:
    layer, rest = place_of(name)
    point = rest.rpartition(".")[2]
    if layer is None:
        return point if point in ("embed", "norm", "logits") else None
    return f"layers.{layer}.{point}" if point in (*LAYER_POINTS, "qkv", "gate_up") else None


def _floats(entries: list) -> list:
    return [entry for entry in entries if entry.dtype.is_floating_point and len(entry.shape) > 1]


def _by_role(visit: Visit, layer: int | None, role: str | None, sizes: Sizes, half: int) -> Iterator[Claim]:
    ins, outs = _floats(visit.ins), _floats(visit.outs)
    hidden_in, hidden_out = ([e for e in side if _is_hidden(e, sizes)] for side in (ins, outs))
    at = f"layers.{layer}."
    before = f"layers.{(sizes.layers if layer is None else layer) - 1}."

    def inner(point: str, entries: list, strength: int) -> Iterator[Claim]:
        if entries:
            yield Claim(at + point, entries[0], strength)

    def stream(entries: list, sublayer: str, residual: str, summed: str, strength: int) -> Iterator[Claim]:
        """The residual stream, whole, or as what was added last and what it is to be added to."""
        if len(entries) == 1:
            yield Claim(summed, entries[0], strength)
        elif len(entries) > 1 and not sublayer.startswith("layers.-1"):
            yield Claim(sublayer, entries[0], strength)
            yield Claim(residual, entries[1], strength)

    last = (before + "mlp", before + "residual", before + "output" if layer != 0 else "embed")
    match role:
        case "input_norm" | "norm":
            yield from stream(hidden_in, *last, CONSUMER)
            if hidden_out:
                yield Claim("norm" if role == "norm" else at + "input_norm", hidden_out[0], PRODUCER)
            if len(hidden_out) > 1:
                yield Claim(last[2], hidden_out[1], PRODUCER)
        case "post_norm":
            yield from stream(hidden_in, at + "o_proj", last[2], at + "residual", CONSUMER)
            yield from inner("post_norm", hidden_out, PRODUCER)
            yield from inner("residual", hidden_out[1:], PRODUCER)
        case "layer":
            yield from stream(hidden_in, *last, CONSUMER)
            yield from stream(hidden_out, at + "mlp", at + "residual", at + "output", PRODUCER)
        case "attention" if len(_headed(ins, sizes)) >= 3 and not hidden_in:
            yield from _core(inner, ins, outs, sizes)
        case "attention":
            yield from inner("input_norm", hidden_in, CONSUMER)
            yield from inner("o", hidden_out, CONSUMER)
        case "core":
            yield from _core(inner, ins, outs, sizes)
        case "feed_forward":
            yield from inner("post_norm", hidden_in, CONSUMER)
            yield from inner("down", hidden_out, CONSUMER)
        case "q" | "k" | "v" | "qkv":
            yield from inner("input_norm", hidden_in, CONSUMER)
            yield from inner(role, outs, PRODUCER)
        case "gate" | "up" | "gate_up":
            yield from inner("post_norm", hidden_in, CONSUMER)
            yield from inner(role, outs, PRODUCER)
        case "q_norm" | "k_norm" if sizes.qk_norm:
            yield from inner(role[0], ins, DIRECT)
            yield from inner(role, outs, PRODUCER)
        case "rotary" if layer is not None:
            raw = ("q_norm", "k_norm") if sizes.qk_norm else ("q", "k")
            heads_in, heads_out = _headed(ins, sizes), _headed(outs, sizes)
            if len(heads_out) == 1:  # called for q, then for k
                heads_in, heads_out = [None] * half + heads_in[:1], [None] * half + heads_out
            for side, points in ((heads_in, raw), (heads_out, ("q_rope", "k_rope"))):
                for point, entry in zip(points, side):
                    if entry is not None:
                        yield Claim(at + point, entry, DIRECT)
        case "o" | "down":
            yield from inner("attn" if role == "o" else "mlp_act", ins, CONSUMER)
            yield from inner(role, hidden_out, PRODUCER)
        case "act":
            if ins and outs and ins[0].shape[-1] == 2 * outs[0].shape[-1]:
                yield from inner("gate_up", ins, CONSUMER)
                yield from inner("mlp_act", outs, PRODUCER)
            else:
                yield from inner("gate", ins, DIRECT)
        case "kv_cache":
            yield from inner("k_rope", _headed(ins, sizes), CONSUMER)
            yield from inner("v", _headed(ins, sizes)[1:], DIRECT)
        case "embed":
            if hidden_out:
                yield Claim("embed", hidden_out[0], PRODUCER)
        case "head" | "logits":
            if hidden_in:
                yield Claim("norm", hidden_in[0], CONSUMER)
            if outs:
                yield Claim("logits", outs[0], PRODUCER)
        case None if layer is None and _is_root(visit.name):
            for entry in outs:
                if entry.path in ("logits", "last_hidden_state"):
                    yield Claim("logits" if entry.path == "logits" else "norm", entry, CONSUMER)
                elif entry.path in ("", "0") and entry.shape:
                    hidden = _is_hidden(entry, sizes) and sizes.hidden != sizes.vocab
                    yield Claim("norm" if hidden else "logits", entry, CONSUMER)


def _core(inner, ins: list, outs: list, sizes: Sizes) -> Iterator[Claim]:
    for point, entry in zip(("q_rope", "k_rope", "v"), _headed(ins, sizes)):
        yield from inner(point, [entry], DIRECT if point == "v" else CONSUMER)
    yield from inner("attn", outs, PRODUCER)


def _is_root(name: str) -> bool:
    return name.rpartition(".")[2] in ("", "model", "transformer", "decoder", *_WRAPPERS)


def _is_hidden(entry, sizes: Sizes) -> bool:
    return 2 <= len(entry.shape) <= 3 and entry.shape[-1] == sizes.hidden


def _headed(entries: list, sizes: Sizes) -> list:
    """Of floating-point tensors, those that can be heads: ``[…, heads * head_dim]`` or ``[…, heads, head_dim]``."""
    return [e for e in entries if len(e.shape) >= 2 and e.shape[-1] % sizes.head_dim == 0]
