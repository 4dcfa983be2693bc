"""Healthy engines of every ordinary kind: what is changed in each, and what is told of its calls."""

from typing import NamedTuple

import torch
from helpers.third_party import FastLike, HfLike, VllmLike
from helpers.third_party_parts import Core, Matrix, Rotary, all_share, planned
from helpers.third_party_runs import TEXTS, batch_calls, flat_calls, run
from helpers.turns import by_turns
from torch import nn
from torch.nn import functional as F

from tplab.ranks import all_reduce, rank

SHAPES = {
    "small": dict(model_type="llama", heads=8, kv_heads=4, head_dim=6, hidden=48, inter=43, vocab=67),
    "uneven": dict(model_type="qwen2", heads=14, kv_heads=2, head_dim=4, hidden=56, vocab=67),
    "normed": dict(model_type="qwen3", heads=6, kv_heads=2, head_dim=8, hidden=36, inter=48, vocab=67),
}
SHORT = dict(dtype=torch.bfloat16)


def of(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


# What may be changed in an engine, and leaves it right.

class InPairs(Rotary):
    """Meta's rotation."""

    def turn(self, x, cos, sin):
        a, b = x.unflatten(-1, (-1, self.dim // 2, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-3).to(x.dtype)


def meta(model, weights, rotation=InPairs):
    """Rows of q and k in Meta's order, and its rotation."""
    rows = torch.arange(weights.config.head_dim).view(2, -1).T.flatten()
    for block in model.layers:
        q, k, _ = block.attention.wqkv.weight.split(block.attention.sizes)
        for part in q, k:
            part.data.copy_(part.data.unflatten(0, (-1, len(rows)))[:, rows].flatten(0, 1).clone())
        block.attention.rotary[0].__class__ = rotation


class Adapted(nn.Module):
    """A LoRA layer in the names of PEFT; the checkpoint holds the sum, the engine what lies beside."""

    def __init__(self, base, a, b, merged):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base, nn.ModuleDict(), nn.ModuleDict()
        self.lora_A["default"], self.lora_B["default"] = (Matrix((f, None)) for f in (a, b))
        if merged:
            base.weight.data -= b @ a

    def forward(self, x):
        more, out = self.lora_B["default"](self.lora_A["default"](x)), self.base_layer(x)
        return (out[0] + more, None) if isinstance(out, tuple) else out + more


def adapted(*names, merged=True):
    def change(model, weights):
        draw = torch.Generator().manual_seed(rank())
        for layer in model.model.layers:
            for name in names:
                part = layer.mlp if hasattr(layer.mlp, name) else layer.self_attn
                base = getattr(part, name)
                a, b = (0.3 * torch.randn(n, m, generator=draw) for n, m in (
                    (4, base.weight.shape[1]), (base.weight.shape[0], 4)))
                setattr(part, name, Adapted(base, a, b, merged))
    return change


def stored(rounding):
    """A cache that rounds what it stores."""
    class Stored(Core):
        def forward(self, q, k, v):
            return super().forward(q, *(rounding(x.unflatten(-1, (-1, self.dim))).flatten(-2) for x in (k, v)))

    def change(model, weights):
        for one in of(model, Core):
            one.__class__ = Stored
    return change


def fp8(scale):
    return lambda x: (x / scale).to(torch.float8_e4m3fn).float() * scale


def scaled(top, cast, x):
    scale = x.abs().amax(-1, keepdim=True) / top
    return cast(x / scale) * scale


def int8(x):
    return scaled(127, torch.round, x)


def rounded_weights(rounding):
    def change(model, weights):
        for one in of(model, Matrix):
            one.weight.data = rounding(one.weight.data)
    return change


def few_digits(rounding):
    def forward(self, x):
        y = F.linear(rounding(x), rounding(self.weight), self.bias)
        y = all_reduce(y) if self.reduce else y
        return (y, None) if self.pair else y

    def change(model, weights):
        for one in of(model, Matrix):
            one.forward = forward.__get__(one)
    return change


def tf32(x):
    kept = x.contiguous().view(torch.int32) >> 13  # 10 bits of the fraction; half to even, as the H200 recording shows
    rest = x.contiguous().view(torch.int32) & 0x1fff
    return ((kept + ((rest > 0x1000) | (rest == 0x1000) & (kept % 2 == 1))) << 13).view(torch.float32)


def by_groups(model, weights):
    """wqkv lies KV head by KV head, and is read so."""
    for block in model.layers:
        attention, count = block.attention, block.attention.sizes[1] // weights.config.head_dim
        parts = torch.arange(sum(attention.sizes)).split(attention.sizes)
        turns = torch.cat([part.view(count, -1) for part in parts], 1).flatten()
        attention.wqkv.weight.data = attention.wqkv.weight[turns]
        attention.forward = read_at(turns.argsort()).__get__(attention)


def read_at(columns):
    def forward(self, x, input_pos):
        q, k, v = self.wqkv(x).flatten(0, 1)[:, columns].split(self.sizes, -1)
        q, k = self.rotary[0](input_pos.flatten(), q, k)
        return all_reduce(self.wo(self.core.forward(q, k, v))).view(x.shape)
    return forward


class Staged(HfLike):
    """Each rank holds some layers, whole; the hidden states go from rank to rank."""

    held = ((0, 1), (2,))

    def __init__(self, w):
        super().__init__(w)
        self.model.layers = nn.ModuleDict({str(i): self.model.layers[i] for i in self.held[rank()]})
        if rank():
            del self.model.embed_tokens
        else:
            del self.model.norm, self.lm_head

    def forward(self, input_ids, position_ids):
        passed = torch.zeros(*input_ids.shape, 48)
        for stage in range(2):
            if stage == rank():
                passed = passed if rank() else self.model.embed_tokens(input_ids)
                for layer in self.model.layers.values():
                    passed = layer(passed, position_ids=position_ids)
            passed = all_reduce(passed if stage == rank() else torch.zeros_like(passed))
        return self.lm_head(self.model.norm(passed)) if rank() else None


class Padded(VllmLike):
    """Rows of sequence -1 are padding: nothing is written for them, and what they hold is not looked at."""

    class Core(Core):
        def forward(self, q, k, v):
            real = [row for row, sequence in enumerate(self.call) if sequence >= 0]
            out, whole, self.call = torch.zeros_like(q), self.call, [self.call[row] for row in real]
            out[real] = super().forward(q[real], k[real], v[real])
            self.call = whole
            return out

    def __init__(self, w):
        super().__init__(w)
        for one in of(self, Core):
            one.__class__ = self.Core


class Rewound(Padded):
    """The rows of a call overwrite what its cache has from its first position on."""

    class Core(Core):
        def forward(self, q, k, v):
            if (number := self.call[0]) in self.past:
                self.past[number] = tuple(x[:self.begin] for x in self.past[number])
            return super().forward(q, k, v)

    def call(self, ids, positions, sequences):
        for one in of(self, Core):
            one.begin = int(positions[0])
        return super().call(ids, positions, sequences)


class Prefixed(Padded):
    """The second text finds six keys of the first in the cache."""

    class Core(Core):
        more = 0

        def forward(self, q, k, v):
            if self.call[0] == 1 and 1 not in self.past:
                self.past[1] = tuple(x[:6] + self.more for x in self.past[0])
            return super().forward(q, k, v)


def forgets(model, weights):
    """No cache: everything is computed anew."""
    for one in of(model, Core):
        one.register_forward_pre_hook(lambda module, args: module.past.clear())


def calls_of(*starts, text=TEXTS[0], number=0):
    """A text in calls that begin at these positions."""
    return [(text[a:b], [*range(a, b)], [number] * (b - a)) for a, b in zip(starts, [*starts[1:], len(text)])]


FLAT, LINES = flat_calls(TEXTS, 2), batch_calls(TEXTS, 2)
PADDED = [FLAT[0], *([[*call[0], 0, 0], [*call[1], 0, 0], [*call[2], -1, -1]] for call in FLAT[1:])]
SAYS = {
    "sequence -1": None,
    "id -1": lambda rec, ids, positions, numbers: rec.inputs(ids.where(numbers >= 0, -1), positions, numbers.abs()),
    "position -1": lambda rec, ids, positions, numbers: rec.inputs(
        ids, positions.where(numbers >= 0, -1), numbers.abs()),
    "sequences of their own": lambda rec, ids, positions, numbers: rec.inputs(
        ids, positions, torch.where(numbers < 0, 9 + torch.arange(len(ids)), numbers)),
    "not at all": lambda rec, *call: rec.inputs(*(x[call[2] >= 0] for x in call)),
}
DRAFTS = [([3, 14, 15, 9, 26], 0), ([5, 35, 8, 30], 5), ([61, 2, 44], 7), ([12, 1], 8), ([50], 10)]
DRAFTED = [(ids, [*range(start, start + len(ids))], [0] * len(ids)) for ids, start in DRAFTS]
SECOND = [*TEXTS[0][:6], 44, 21, 9, 5]
PREFIX = [(TEXTS[0], [*range(9)], [0] * 9), *calls_of(6, 9, text=SECOND, number=1)]


def tell(whole):
    """``rec.inputs`` with the whole text of every sequence in a call."""
    def said(rec, ids, positions, numbers):
        ends = {int(n): int(p) + 1 for n, p in zip(numbers, positions)}
        rec.inputs(ids, positions, numbers, {n: whole[n][:end] for n, end in ends.items()})
    return said


def tell_before(rec, ids, positions, numbers):
    """A call in which nothing runs tells the beginning of the text."""
    if int(numbers[0]) == 1 and int(positions[0]) == 6:
        rec.inputs(SECOND[:6], range(6), [1] * 6)
    rec.inputs(ids, positions, numbers)


class Set(NamedTuple):
    """An engine, what it runs, and what the check is told."""

    engine: type
    calls: list
    change: object = lambda model, weights: None
    shape: str = "small"
    options: dict = {}  # of helpers.third_party_runs.run
    warns: str = ""
    asks: str = ""  # of the question that is asked; it is answered by ...
    told: dict = {}  # ... arguments of check
    said: object = None  # ... or by what rec.inputs is told


def padded(total, count, rank):
    return [i if i < total else -1 for i in range(rank * count, (rank + 1) * count)]


ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
SETUPS = {
    **{f"{size} ranks, {engine.__name__}": Set(engine, calls, options=dict(size=size))
       for (engine, calls), size in by_turns(((VllmLike, FLAT), (HfLike, LINES), (FastLike, LINES)), (1, 2, 3, 4),
                                             least=6)},
    "uneven heads": Set(VllmLike, FLAT, shape="uneven", options=dict(size=3)),
    "replicated KV heads": Set(VllmLike, FLAT, shape="uneven", options=dict(size=4)),
    "norms of q and k": Set(VllmLike, FLAT, shape="normed"),
    "all KV heads on each rank": Set(HfLike, LINES, options=dict(shares=dict(kv=[range(4)] * 2))),
    "equal shares with padding": Set(VllmLike, FLAT, options=dict(shares=dict(
        mlp=[padded(43, 24, r) for r in (0, 1)], vocab=[padded(67, 36, r) for r in (0, 1)]))),
    "Meta's order": Set(FastLike, LINES, meta, asks="lie in pairs", told=dict(layout=["pairs"])),
    "Meta's order in bfloat16": Set(FastLike, LINES, meta, options=SHORT, asks="lie in pairs",
                                    told=dict(layout=["pairs"])),
    "q|k|v in groups": Set(FastLike, LINES, by_groups, asks="KV head by KV head", told=dict(layout=["groups"])),
    "LoRA on attention": Set(HfLike, LINES, adapted(*ATTENTION)),
    "LoRA on the MLP": Set(HfLike, LINES, adapted(*MLP, "down_proj")),
    "LoRA on fused matrices": Set(VllmLike, FLAT, adapted("qkv_proj", "gate_up_proj")),
    "a cache in fp8": Set(VllmLike, FLAT, stored(fp8(1.0)), warns="a cache in fp8 (e4m3), scale 1"),
    "a scaled cache in fp8": Set(VllmLike, FLAT, stored(fp8(0.25)), warns="a cache in fp8 (e4m3)"),
    "a cache in int8": Set(VllmLike, FLAT, stored(int8), warns="a cache in int8"),
    "int8 weights": Set(VllmLike, FLAT, rounded_weights(int8), warns="int8 weights, a scale for each row"),
    "fp8 weights": Set(VllmLike, FLAT, rounded_weights(lambda x: scaled(448, fp8(1.0), x)), warns="fp8 (e4m3) weights"),
    "TF32": Set(VllmLike, FLAT, few_digits(tf32), warns="TF32 products"),
    "bfloat16 products": Set(HfLike, LINES, few_digits(lambda x: x.bfloat16().float()), warns="bfloat16 products"),
    "bfloat16": Set(VllmLike, FLAT, options=SHORT), "float16": Set(HfLike, LINES, options=dict(dtype=torch.float16)),
    "float64": Set(VllmLike, FLAT, options=dict(dtype=torch.float64)),
    **{f"a padded decode batch, said by {how}": Set(Padded, PADDED, said=said) for how, said in SAYS.items()},
    "chunked prefill": Set(VllmLike, [*calls_of(0, 4, 7, 8), *calls_of(0, 5, text=TEXTS[1], number=1)]),
    "a prefix that another text computed": Set(
        Prefixed, PREFIX, asks="goes on with sequence 1 at position 6", said=tell({0: TEXTS[0], 1: SECOND})),
    "a prefix told by a call in which nothing runs": Set(Prefixed, PREFIX, said=tell_before),
    "a prompt that another server computed": Set(VllmLike, calls_of(0, 6, 7, 8), options=dict(unrecorded=1),
                                                 said=tell({0: TEXTS[0]})),
    "the same in bfloat16": Set(VllmLike, calls_of(0, 6, 7, 8), options=dict(unrecorded=1, **SHORT),
                                said=tell({0: TEXTS[0]})),
    "preemption": Set(Rewound, [*calls_of(0, 5, 6, text=TEXTS[0][:7]), *calls_of(0, 7, 8)]),
    "no cache": Set(VllmLike, [call for n in (3, 5, 6) for call in calls_of(0, text=TEXTS[0][:n])], forgets),
    "rejected drafts": Set(Rewound, DRAFTED),
    "rejected drafts, without numbers": Set(Rewound, DRAFTED, said=lambda rec, ids, positions, _: rec.inputs(
        ids, positions)),
    "pipeline stages": Set(Staged, LINES, options=dict(one=True)),
    "rank 0 of two alone": Set(VllmLike, FLAT, options=dict(ranks=[0]), warns="rank 1 of 2 recorded nothing"),
    "rank 1 of two alone": Set(HfLike, LINES, options=dict(ranks=[1]), warns="rank 0 of 2 recorded nothing"),
    "texts of one token": Set(VllmLike, flat_calls([[1, 5], [5, 7], [9, 4]], 1), options=dict(size=4)),
}


def recorded(folder, ckpt, setup, said=None):
    options = dict(setup.options)
    if isinstance(options.get("shares"), dict):
        options["shares"] = all_share(planned(ckpt, 2), **options["shares"])
    if options.pop("one", False):
        options["shares"] = planned(ckpt, 1) * 2
    run(folder, ckpt, setup.engine, setup.calls, change=setup.change, said=said, **options)
    return folder
