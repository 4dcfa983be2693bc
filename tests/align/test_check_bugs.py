"""Bugs in engines from outside of the lab, in one table: what the check names, where, and its exit code."""

from typing import NamedTuple

import pytest
import torch
from helpers.setups import (
    FLAT,
    LINES,
    PREFIX,
    SECOND,
    Prefixed,
    Set,
    Staged,
    adapted,
    calls_of,
    few_digits,
    fp8,
    meta,
    of,
    recorded,
    stored,
    tell,
    tf32,
)
from helpers.third_party import FastLike, HfLike, VllmLike
from helpers.third_party_parts import Core, Norm, Rotary
from helpers.third_party_runs import TEXTS
from test_check_setups import opened  # noqa: F401
from torch import nn
from torch.nn import functional as F

from tplab.align import check
from tplab.ranks import all_gather, rank

__all__ = ["opened"]  # a fixture


def each(kind, **changed):
    """Other values of attributes, or other methods, of all modules of a kind."""
    def change(model, weights):
        for one in of(model, kind):
            for name, value in changed.items():
                setattr(one, name, value.__get__(one) if callable(value) else value)
    return change


def theta(model, weights):
    for rotary in (block.attention.rotary[0] for block in model.layers) if isinstance(model, FastLike) else of(
            model, Rotary):
        rotary.theta = 10000.0 * 50


def no_sum(model, weights):
    for layer in model.model.layers:
        layer.self_attn.o_proj.reduce = False


def summed_in_decode_only(model, weights):
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda o, args: setattr(o, "reduce", len(args[0]) <= 2))


def embedding_not_summed(model, weights):
    model.model.embed_tokens.forward = unsummed(model.model.embed_tokens)


def unsummed(embedding):
    """A vocabulary-parallel lookup that leaves the rows of other ranks zero."""
    def lookup(ids):
        there = torch.isin(ids, torch.tensor(list(embedding.rows)))
        return F.embedding((ids - embedding.rows[0]) * there, embedding.weight) * there[..., None]
    return lookup


def fused(order, module="qkv_proj"):
    """A fused matrix filled in another order than it is read in."""
    def change(model, weights):
        for i, layer in enumerate(model.model.layers):
            part, at = (layer.self_attn, "self_attn") if module == "qkv_proj" else (layer.mlp, "mlp")
            getattr(part, module).weight.data = torch.cat(
                [weights.cut(f"model.layers.{i}.{at}.{x}_proj") for x in order])
    return change


def along_dim_1(model, weights):
    for i, layer in enumerate(model.model.layers):
        for x in "qkv":
            own = getattr(layer.self_attn, f"{x}_proj").weight
            whole = weights.get(f"model.layers.{i}.self_attn.{x}_proj.weight")
            own.data = whole.chunk(2, 1)[rank()].reshape(own.shape).contiguous()


def exchanged_norms(model, weights):
    for layer in model.model.layers:
        a, b = layer.input_layernorm, layer.post_attention_layernorm
        a.weight, b.weight = b.weight, a.weight


def lost_adapter(model, weights):
    adapted("q_proj")(model, weights)
    if rank() == 1:
        for layer in model.model.layers:
            layer.self_attn.q_proj.lora_B["default"].weight.data.zero_()


def both(*changes):
    def change(model, weights):
        for one in changes:
            one(model, weights)
    return change


def halved(model, weights):
    if "2" in model.model.layers:
        model.model.layers["2"].mlp.act_fn.forward = lambda x: F.silu(x) / 2


class Gap(Staged):
    held = ((0,), (2,))


class OtherBlock(Prefixed):
    class Core(Prefixed.Core):
        more = 1


class Joined(HfLike):
    """A module that gathers the logits wrongly."""

    class Gather(nn.Module):
        def __init__(self, heads, join, sizes):
            super().__init__()
            self.heads, self.join, self.sizes = heads, join, sizes

        def forward(self, x):
            for head in self.heads:
                x = head(x)
            return self.join(all_gather(x, sizes=self.sizes))

    join = staticmethod(lambda x: x.roll(1, -1))

    def __init__(self, w):
        super().__init__(w)
        self.logits_processor = self.Gather([], self.join, w.vocab_sizes)

    def forward(self, input_ids, position_ids):
        return self.logits_processor(self.lm_head(self.model(input_ids, position_ids)))


class Folded(Joined):
    join = staticmethod(lambda x: x.transpose(0, 1).reshape(x.shape))


class Wide(HfLike):
    """A head whose gathered output has columns of padding."""

    join = staticmethod(lambda x: F.pad(x, (0, 5), value=1e4))

    def __init__(self, w):
        super().__init__(w)
        self.lm_head = Joined.Gather([self.lm_head], self.join, w.vocab_sizes)

    def forward(self, input_ids, position_ids):
        return self.lm_head(self.model(input_ids, position_ids))


class Reversed(Wide):
    """A head that joins the ranks' logits in reverse order; rank 0 has one more."""

    join = staticmethod(lambda x: torch.cat([x[..., -(x.shape[-1] // 2):], x[..., :-(x.shape[-1] // 2)]], -1))


def scaled_twice(q, k, v):
    return q * 6 ** -0.5, k, v


def scaled_by_local_heads(q, k, v):
    return q * 2 ** -0.5, k, v  # hidden size / heads on this rank, of two


def attention(before):
    """An attention whose inputs are changed."""
    def change(model, weights):
        for one in of(model, Core):
            right = one.forward
            one.forward = lambda *x, right=right: right(*before(*x))
    return change


class Bug(NamedTuple):
    setup: Set
    fault: str | None
    point: str
    ranks: tuple = ()  # on which alone it shows


FIRST = dict(shares=dict(kv=[(0, 1), (0, 1)]))
BUGS = {
    "theta": Bug(Set(VllmLike, FLAT, theta), "rope_theta", "layers.0.q_rope"),
    "theta, nothing recorded between wqkv and wo": Bug(Set(FastLike, LINES, theta), "rope_theta", "layers.0.attn"),
    "epsilon": Bug(Set(HfLike, LINES, each(Norm, eps=0.01)), "norm_epsilon", "layers.0.input_norm"),
    "softmax scale": Bug(Set(VllmLike, FLAT, attention(scaled_twice)), "softmax_scale", "layers.0.attn"),
    "scale by the heads of a rank": Bug(Set(VllmLike, FLAT, attention(scaled_by_local_heads)), "softmax_scale",
                                        "layers.0.attn"),
    "the embedding not summed": Bug(Set(VllmLike, FLAT, embedding_not_summed), "all_reduce_missing", "embed"),
    "logits joined in reverse order": Bug(Set(Reversed, LINES), "head_rows", "logits"),
    "keys and values exchanged": Bug(Set(VllmLike, FLAT, attention(lambda q, k, v: (q, v, k))), None, "layers.0.attn"),
    "no all-reduce": Bug(Set(VllmLike, FLAT, no_sum), "all_reduce_missing", "layers.0.o_proj"),
    "no all-reduce in prompts": Bug(Set(VllmLike, FLAT, summed_in_decode_only), "all_reduce_missing",
                                    "layers.0.o_proj"),
    "rank 0's KV heads on all": Bug(Set(HfLike, LINES, options=FIRST), "kv_first_rows", "layers.0.k", (1,)),
    "rank 0's KV heads on all, bfloat16": Bug(Set(HfLike, LINES, options=FIRST | dict(dtype=torch.bfloat16)),
                                              "kv_first_rows", "layers.0.k", (1,)),
    "cut along dimension 1": Bug(Set(HfLike, LINES, along_dim_1), None, "layers.0.q"),
    "q, v, k": Bug(Set(VllmLike, FLAT, fused("qvk")), "qkv_order", "layers.0.k"),
    "up before gate": Bug(Set(VllmLike, FLAT, fused(("up", "gate"), "gate_up_proj")), None, "layers.0.gate"),
    "norms exchanged": Bug(Set(HfLike, LINES, exchanged_norms), "norm_weight_exchanged", "layers.0.input_norm"),
    "Meta's rows, rotated in halves": Bug(Set(FastLike, LINES, lambda m, w: meta(m, w, Rotary)), "rope_permuted_rows",
                                          "layers.0.q"),
    "an adapter lost on one rank": Bug(Set(HfLike, LINES, lost_adapter), None, "layers.0.q", (1,)),
    "scaled twice, over a cache in fp8": Bug(Set(VllmLike, FLAT, both(stored(fp8(1.0)), attention(scaled_twice))),
                                             None, "layers.0.attn"),
    "epsilon beside TF32": Bug(Set(VllmLike, FLAT, both(few_digits(tf32), each(Norm, eps=0.01))), "norm_epsilon",
                               "layers.0.input_norm"),
    "in one stage of a pipeline": Bug(Set(Staged, LINES, halved, options=dict(one=True)), None, "layers.2.mlp_act"),
    "a layer on no rank": Bug(Set(Gap, LINES, options=dict(one=True)), "layer_skipped", "layout"),
    "another text's block": Bug(Set(OtherBlock, PREFIX, said=tell({0: TEXTS[0], 1: SECOND})), None, "layers.0.attn"),
    "decode positions one too early": Bug(Set(VllmLike, [*calls_of(0, text=TEXTS[0][:7]), ([8], [6], [0]), (
        [30], [7], [0])]), "rope_positions", "layers.0.q_rope"),
    "joined logits in another order": Bug(Set(Joined, LINES), "head_rows", "layout"),
    "joined logits that are none": Bug(Set(Folded, LINES), None, "layout"),
    "a padding column is drawn": Bug(Set(Wide, LINES), "vocab_padding", "layout"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_an_engine_from_outside(opened, tmp_path, name, monkeypatch, capsys):
    setup, what, point, ranks = BUGS[name]
    if issubclass(setup.engine, Staged):
        monkeypatch.setattr("helpers.third_party.all_reduce", lambda x: x)
    ckpt = opened(setup.shape)
    report = check(recorded(tmp_path / "run", ckpt, setup, setup.said), ckpt)
    assert report.verdict == "bug" and not report.failed, report.summary()
    first = report.diagnoses[0]
    assert what in first.names or what is first.fault, report.summary()
    assert first.point == point and first.ranks == ranks, report.summary()
