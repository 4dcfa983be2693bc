"""What names do not say: a module known by what it does, a tensor by what it equals, on tensors made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.arithmetic import rms_norm
from tplab.align.check import evident
from tplab.align.check.evident import _equals, _is_row_parallel, _role
from tplab.align.check.names import EVIDENT
from tplab.align.check.sources import Source

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
WHOLE = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
NORM = torch.tensor([0.5, 2.0, 1.0, 3.0])


def made(outs, size=2, true=WHOLE, vocab=6, votes=(0, 1), ways=1):
    """``outs``: per rank what was recorded of a source, None for a rank without."""
    ranks = [rank for rank, out in enumerate(outs) if out is not None]
    sources = Some(complete=lambda source: ranks, rows=lambda source, rank, look: _lost(outs[rank]),
                   heads=lambda source, rank, look: dict(enumerate(["no", outs[rank]][-ways:])) if ways else {},
                   logits=lambda source, rank, look: _lost(outs[rank]) if isinstance(outs[rank], str) else (
                       [(0, 0)], outs[rank]))
    reference = Some(point=lambda name: None if name == "layers.0.v" else true, logits=lambda places: true)
    shares = Some(size=size, config=Some(vocab_size=vocab), reference=reference,
                  vote=lambda which, tensor, full, rank: None if isinstance(tensor, str) or rank not in votes or
                  full is not true else (which,))
    return sources, shares, Some()


def _lost(out):
    return None if isinstance(out, str) else out


@pytest.mark.parametrize("name, outs, more, equal", [
    ("norm", [WHOLE, WHOLE], {}, True), ("norm", [WHOLE, WHOLE + 1], {}, False), ("norm", [WHOLE, "lost"], {}, False),
    ("norm", [WHOLE, None], {}, True), ("norm", [None, None], {}, False),
    ("layers.0.o_partial", [WHOLE - 1, torch.ones(3, 6)], {}, True), ("layers.0.o_partial", [WHOLE, WHOLE], {}, False),
    ("layers.0.o_partial", [WHOLE, None], {}, False),  # of one rank of two nobody can say it
    ("layers.0.o_partial", [WHOLE - 1, torch.ones(3, 6), None], {"size": 3}, False),
    ("layers.0.o_partial", [WHOLE], {"size": 1}, False), ("layers.0.o_partial", [WHOLE, "lost"], {}, False),
    ("layers.0.o_partial", [WHOLE[:, :3], WHOLE[:, 3:]], {}, False),
    ("layers.0.q", [WHOLE, WHOLE], {}, True), ("layers.0.q", [WHOLE, WHOLE], {"votes": (0,)}, False),
    ("layers.0.q", [WHOLE, WHOLE], {"ways": 2}, True), ("layers.0.q", [WHOLE, WHOLE], {"ways": 0}, False),
    ("layers.0.v", [WHOLE, WHOLE], {}, False),  # Hugging Face's trace has none
    ("layers.0.mlp_act", [WHOLE, WHOLE], {}, True), ("layers.0.mlp_act", [WHOLE, WHOLE], {"votes": (1,)}, False),
    ("layers.0.mlp_act", [WHOLE, "lost"], {}, False),
    ("logits", [WHOLE[:, :3], WHOLE[:, 3:]], {}, True), ("logits", [WHOLE[:, :2], WHOLE[:, :2]], {}, False),
    ("logits", [WHOLE, WHOLE], {"votes": (0,)}, False), ("logits", [WHOLE, "lost"], {}, False),
    ("logits", [None, None], {}, False)])
def test_what_a_tensor_equals(name, outs, more, equal):
    sources, shares, source = made(outs, **more)
    assert _equals(sources, shares, source, name) is equal


# Row-parallel layers.

OWN, BIAS = [WHOLE, 2 - WHOLE * 3], torch.arange(6.0)
TOTAL = sum(OWN)


def row_parallel(outs, bias=BIAS, width=4):
    ranks = [rank for rank, out in enumerate(outs) if out is not None]
    entering, leaving = Some(), Some()
    sources = Some(complete=lambda source: ranks, rows=lambda source, rank, look: (
        None if width is None else torch.ones(3, width)) if source is entering else outs[rank])
    own = {(0, 1, 2, 3): OWN[0], (4, 5, 6, 7): OWN[1]}
    shares = Some(config=Some(head_dim=2), planned={"q": [(0, 1), (2, 3)], "mlp": [range(4), range(4, 8)]},
                  evidence=Some(bias=lambda layer, role: bias,
                                summand=lambda layer, role, x, columns: own[tuple(columns)]))
    return {role: _is_row_parallel(sources, shares, entering, leaving, 0, role) for role in ("o", "down")}


@pytest.mark.parametrize("outs, found", [
    (OWN, True), ([TOTAL] * 2, True), ([own + BIAS for own in OWN], True), ([TOTAL + BIAS] * 2, True),
    ([OWN[0], None], True), ([OWN[1], OWN[0]], False), ([TOTAL, OWN[1]], False), ([TOTAL + 1] * 2, False),
    ([OWN[0], OWN[1] + BIAS], False)])
def test_a_row_parallel_layer_gives_summands_or_the_sum(outs, found):
    assert row_parallel(outs) == {"o": found, "down": found}
    assert row_parallel(outs, width=5) == row_parallel(outs, width=None) == {"o": False, "down": False}
    assert not row_parallel([out if out is None else out + BIAS for out in outs], bias=None)["o"]


# Modules.

def role(y, x=X, layer="layers.1.", votes=(), labels=(), row=None, monkeypatch=None):
    """The role of a module ``layers.1.thing`` that makes ``y`` of ``x`` (of the token ids if there is none)."""
    entering, leaving = None if x is None else Some(name="in"), Some(name=f"{layer}thing")
    sources = Some(complete=lambda source: [1], texts=Some(ids=[[2, 0, 1]]), places=[(0, 0), (0, 1), (0, 2)],
                   rows=lambda source, rank, look: (y if source is leaving else x) if rank == 1 else None)
    weights = {"model.embed_tokens.weight": X[[1, 2, 0]], "model.norm.weight": NORM,
               "model.layers.1.input_layernorm.weight": NORM,
               "model.layers.1.post_attention_layernorm.weight": NORM + 1}
    asked = {"heads": lambda layer, which, x: (which, layer), "projection": lambda layer, which, x: (which, layer),
             "logits": lambda x: ("vocab", None)}
    shares = Some(config=Some(hidden_size=4, rms_norm_eps=1e-6, head_dim=2), evidence=Some(
        weight=weights.get, **asked), vote=lambda which, local, full, rank: full in votes and (0,),
        size=2, totals=dict.fromkeys(("q", "k", "v", "mlp"), 2))
    for name, label in (("heads_in", "qkv"), ("columns_in", "gate_up")):
        monkeypatch.setattr(evident, name, lambda shares, label=label: Some(labels=lambda *_: label in labels))
    monkeypatch.setattr(evident, "_is_row_parallel", lambda *given: given[-1] == row)
    return _role(sources, shares, entering, leaving)


@pytest.mark.parametrize("y, more, found", [
    (X, {"x": None, "layer": ""}, "embed"), (X, {"x": None}, None), (X[[1, 0, 2]], {"x": None, "layer": ""}, None),
    (X[:, :3], {"x": None, "layer": ""}, None), (rms_norm(X, NORM, 1e-6), {}, "input_norm"),
    (rms_norm(X, NORM + 1, 1e-6), {}, "post_norm"), (rms_norm(X, NORM, 1e-6), {"layer": ""}, "norm"),
    (rms_norm(X, NORM + 1, 1e-6), {"layer": ""}, None), (WHOLE, {"layer": "", "votes": [("vocab", None)]}, "head"),
    (WHOLE, {"layer": "", "votes": [("vocab", None)], "x": WHOLE}, None), (WHOLE, {"layer": ""}, None),
    *((WHOLE, {"votes": [(which, 1)]}, which) for which in ("q", "k", "v", "gate", "up")),
    (WHOLE[:, :5], {"votes": [("q", 1), ("gate", 1)]}, "gate"),  # five columns are no heads of two
    (WHOLE, {"votes": [("q", 0)]}, None), (WHOLE, {"votes": [("q", 1)], "x": WHOLE}, None),
    (WHOLE, {"labels": ["qkv", "gate_up"]}, "qkv"), (WHOLE, {"labels": ["gate_up"]}, "gate_up"),
    (X, {"row": "o", "x": WHOLE}, "o"), (X, {"row": "down"}, "down"), (WHOLE, {"row": "o"}, None), (None, {}, None)])
def test_what_a_module_does(y, more, found, monkeypatch):
    assert role(y, monkeypatch=monkeypatch, **more) == found


# What is learnt of all of them.

class Unclaimed:
    """Sources that nobody claimed; what was claimed is not unclaimed any more."""

    def __init__(self, *sources):
        self.sources, self.claimed = [Source(*source, EVIDENT, order) for order, source in enumerate(sources)], []

    def unclaimed(self):
        roles = self.claimed[-1].get("roles", {}) if self.claimed else {}
        return [source for source in self.sources if source.pattern[0] not in roles]

    def claim(self, **given):
        self.claimed.append({key: dict(value) for key, value in given.items()})


def learnt(monkeypatch, *sources, roles=None, points=None):
    """``roles``: by a module's name; ``points``: by a source's name."""
    found, seen = Unclaimed(*sources), []
    monkeypatch.setattr(evident, "_role", lambda _, shares, entering, leaving: seen.append(
        (entering and entering.path, leaving.name)) or (roles or {}).get(leaving.name))
    monkeypatch.setattr(evident, "_equals", lambda _, shares, source, name: (points or {}).get(source.name) == name)
    return evident.learn(found, None), found.claimed, seen


def both(*names):
    return [(name, kind, path) for name in names for kind, path in (("in", "0"), ("in", "1"), ("out", ""))]


def test_of_each_pattern_the_first_layers_module_is_asked_with_its_first_input(monkeypatch):
    found, claimed, seen = learnt(monkeypatch, *both("h.0.mix", "h.1.mix"), ("h.0.silent", "in", "0"),
                                  ("h.0.source", "out", ""), roles={"h.0.mix": "q"})
    assert seen == [("0", "h.0.mix"), (None, "h.0.source")], "what gives nothing is not asked"
    assert found == {"h.{i}.mix": "known by what it does: q"} and claimed == [{"roles": {"h.{i}.mix": "q"}}]


@pytest.mark.parametrize("roles, learnt_so", [
    (["input_norm", "post_norm"], ["input_norm", "post_norm"]),
    (["post_norm", "input_norm"], ["input_norm", "post_norm"]),  # with each other's weights: a bug, which is to be seen
    (["input_norm", "input_norm"], ["input_norm", "input_norm"]), (["post_norm", "q"], ["post_norm", "q"])])
def test_norms_stand_in_their_order_whatever_their_weights(monkeypatch, roles, learnt_so):
    _, claimed, _ = learnt(monkeypatch, *both("h.0.zeta", "h.0.alpha"), roles=dict(zip(("h.0.zeta", "h.0.alpha"),
                                                                                        roles)))
    assert claimed == [{"roles": dict(zip(("h.{i}.zeta", "h.{i}.alpha"), learnt_so))}]


def test_what_no_module_is_known_by_is_held_against_hugging_faces_points(monkeypatch):
    found, claimed, _ = learnt(monkeypatch, *both("h.0.mix"), ("h.0.t", "tensor", ""), ("h.1.t", "tensor", ""),
                               ("last", "tensor", ""), ("n", "tensor", ""), ("e", "tensor", ""), ("x", "tensor", ""),
                               roles={"h.0.mix": "q"}, points={"h.0.t": "layers.0.attn", "h.1.t": "layers.1.v",
                                                               "last": "logits", "n": "norm", "e": "embed"})
    points = {("h.{i}.t", "tensor", ""): "layers.{i}.attn", ("last", "tensor", ""): "logits",
              ("n", "tensor", ""): "norm", ("e", "tensor", ""): "embed"}
    assert claimed == [{"roles": {"h.{i}.mix": "q"}}, {"roles": {"h.{i}.mix": "q"}, "points": points}]
    assert found[("h.{i}.t", "tensor", "")] == "equals Hugging Face's layers.{i}.attn" and len(found) == 5


def test_tables_and_masks_of_known_modules_are_no_points_but_tensors_by_hand_may_be(monkeypatch):
    sources = (("layers.0.mlp", "in", "mask"), ("layers.0.self_attn.q_proj", "tensor", ""), ("thing", "out", ""))
    found, _, seen = learnt(monkeypatch, *sources, points={"layers.0.mlp": "layers.0.up", "thing": "norm",
                                                           "layers.0.self_attn.q_proj": "layers.0.k"})
    assert set(found) == {("layers.{i}.self_attn.q_proj", "tensor", ""), ("thing", "out", "")}
    assert seen == [(None, "thing")]
    assert learnt(monkeypatch, ("thing", "out", "")) == ({}, [], [(None, "thing")]), "nothing found, nothing claimed"
