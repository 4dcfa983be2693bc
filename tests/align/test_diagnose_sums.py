"""Norms and residual streams of a real run with something else in them: each by its name and words, a near miss not."""

import pytest
import torch
from helpers.real_cases import AT, RealRun, asked, asks_for

MODEL = "model.layers.1."
DIM, HIDDEN, EPS = 8, 24, 1e-5
NORMS = {"input_norm": ("input_layernorm", "layers.0.output"),
         "post_norm": ("post_attention_layernorm", AT + "residual"),
         "q_norm": ("self_attn.q_norm", AT + "q"), "k_norm": ("self_attn.k_norm", AT + "k")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """6 query heads and 3 KV heads over 3 ranks, each of 8 numbers; queries and keys are normed."""
    return RealRun(tmp_path_factory.mktemp("model") / "m", "qwen3", 3, layers=2, heads=6, kv_heads=3, head_dim=DIM,
                   hidden=HIDDEN, eps=EPS, attention_bias=True)


# Norms.

def normed(x, weight, eps=EPS, over=-1):
    x = x.float()
    return weight * x * torch.rsqrt(x.pow(2).mean(over, keepdim=True) + eps)


def by_deviation(x, weight):
    return weight * x * torch.rsqrt(x.var(-1, keepdim=True) + EPS)


EVERY = pytest.mark.parametrize("point", NORMS)


def made(run, point, make):
    name, source = NORMS[point]
    weight = run.w(f"{MODEL}{name}.weight")
    return [make(run.x(source, rank), weight) for rank in range(3)]


@EVERY
def test_the_norm_by_hand_is_right(run, point):
    for rank, held in enumerate(made(run, point, normed)):
        assert torch.allclose(held, run.x(AT + point, rank), atol=1e-5)


@EVERY
@pytest.mark.parametrize("fault, make", [("norm_weight_missing", lambda x, w: normed(x, 1.0)),
    ("norm_plus_one", lambda x, w: normed(x, 1 + w)),
    ("layer_norm", lambda x, w: normed(x - x.mean(-1, keepdim=True), w)), ("norm_by_deviation", by_deviation),
    ("norm_twice", lambda x, w: normed(normed(x, w), w))])
def test_another_kind_of_norm(run, point, fault, make):
    found = asked(run, asks_for("norm_weight_missing"), made(run, point, make), AT + point)
    assert found.fault == fault


@EVERY
@pytest.mark.parametrize("eps", [1e-2, 1e-3, 1e-1])
def test_another_epsilon_is_read_off(run, point, eps):
    held = made(run, point, lambda x, w: normed(x, w, eps))
    found = asks_for("norm_epsilon")(run.case(AT + point, held))
    assert found.fault == "norm_epsilon" and found.numbers == {"epsilon": pytest.approx(eps, rel=0.1)}


@pytest.mark.parametrize("point", ["q_norm", "k_norm"])
def test_the_mean_over_all_heads(run, point):
    held = made(run, point, lambda x, w: normed(x, w, over=(-2, -1)))
    if point == "k_norm":  # one KV head a rank: there is no other
        assert torch.allclose(held[0], run.x(AT + point, 0), atol=1e-5)
        return
    found = asked(run, asks_for("norm_over_all_heads"), held, AT + point)
    assert found.fault == "norm_over_all_heads"


@EVERY
@pytest.mark.parametrize("other, fault", [("other layer", "wrong_layer"), ("other norm", "norm_weight_exchanged")])
def test_the_weight_of_another_norm(run, point, other, fault):
    name = NORMS[point][0]
    there = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm",
             "self_attn.q_norm": "self_attn.k_norm", "self_attn.k_norm": "self_attn.q_norm"}[name]
    full = f"model.layers.0.{name}.weight" if other == "other layer" else f"{MODEL}{there}.weight"
    held = made(run, point, lambda x, w: normed(x, run.w(full)))
    found = asked(run, asks_for("norm_weight_exchanged"), held, AT + point)
    assert found.fault == fault


@pytest.mark.parametrize("source", ["layers.0.output", AT + "o_proj"])
def test_the_norm_of_something_else(run, source):
    held = [normed(run.x(source, rank), run.w(f"{MODEL}post_attention_layernorm.weight")) for rank in range(3)]
    found = asked(run, asks_for("norm_wrong_input"), held, AT + "post_norm")
    assert found.fault == "norm_wrong_input"


# Residual streams.

@pytest.mark.parametrize("point, names, fault", [("residual", {"before": 0, "o_proj": 1}, "residual_missing"),
    ("residual", {"before": 1, "o_proj": 0}, "sublayer_missing"),
    ("residual", {"input_norm": 1, "o_proj": 1}, "residual_wrong_place"),
    ("residual", {"before": 3, "o_proj": 1}, "residual_on_every_rank"),
    ("residual", {"before": 1, "o_proj": 3}, "all_reduce_twice"), ("residual", {"before": 1, "o_proj": 2}, None),
    ("output", {"residual": 0, "mlp": 1}, "residual_missing"),
    ("output", {"residual": 1, "mlp": 0}, "sublayer_missing"),
    ("output", {"before": 1, "mlp": 1}, "residual_wrong_place"),
    ("output", {"post_norm": 1, "mlp": 1}, "residual_wrong_place"),
    ("output", {"residual": 3, "mlp": 1}, "residual_on_every_rank"),
    ("output", {"residual": 1, "mlp": 3}, "all_reduce_twice")])
def test_another_sum(run, point, names, fault):
    def of(name):
        return "layers.0.output" if name == "before" else AT + name
    held = [sum(times * run.x(of(name), rank) for name, times in names.items()) for rank in range(3)]
    found = asked(run, asks_for("residual_missing"), held, AT + point)
    assert found.fault == fault
    assert {name: times for name, times in found.numbers.items() if times} == {n: t for n, t in names.items() if t}


def test_of_numbers_that_are_lost_nothing_is_a_sum(run):
    held = run.changed(AT + "output", lambda x, rank: 2 * x)
    lost = {AT + "mlp": [run.x(AT + "mlp", 0).clone() for _ in range(3)]}
    for x in lost[AT + "mlp"]:
        x[2, 3] = float("nan")
    assert asks_for("residual_missing")(run.case(AT + "output", held, instead=lost)) is None
    held[0][0, 0] = float("inf")
    assert asks_for("residual_missing")(run.case(AT + "output", held)) is None


def test_sublayers_beside_each_other(run):
    """The MLP gets the layer's input as well, so that attention's output comes to the sum behind it."""
    stream = {AT + "residual": [run.x("layers.0.output", rank) for rank in range(3)]}
    held = [run.x("layers.0.output", rank) + run.x(AT + "mlp", rank) + run.x(AT + "o_proj", rank) for rank in range(3)]
    found = asked(run, asks_for("residual_missing"), held, AT + "output", instead=stream)
    assert found.fault == "parallel_sublayers"
    held = [x + run.x(AT + "mlp", rank) for rank, x in enumerate(held)]
    assert asked(run, asks_for("residual_missing"), held, AT + "output", instead=stream).fault is None
