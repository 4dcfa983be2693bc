"""Products with other weights, norms of something else, another MLP: each by its name and words, a near miss not."""

import pytest
import torch
from helpers.real_cases import AT, RealRun, asked, asks_for
from torch.nn import functional as F

from tplab.align.diagnose.altered import AlteredFrame
from tplab.align.diagnose.cuts import in_other_places

MODEL = "model.layers.1."
DIM, HIDDEN = 6, 48
MODULES = {"q": ("self_attn.q_proj", "input_norm"), "k": ("self_attn.k_proj", "input_norm"),
           "v": ("self_attn.v_proj", "input_norm"), "gate": ("mlp.gate_proj", "post_norm"),
           "up": ("mlp.up_proj", "post_norm"), "o_partial": ("self_attn.o_proj", "attn"),
           "mlp_partial": ("mlp.down_proj", "mlp_act")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """8 query heads and 4 KV heads over 2 ranks, with every bias."""
    return RealRun(tmp_path_factory.mktemp("model") / "m", layers=3, heads=8, kv_heads=4, head_dim=DIM, hidden=HIDDEN,
                   attention_bias=True, mlp_bias=True)


def features(run, point, rank):
    size = 1 if point in ("gate", "up", "mlp_partial") else run.config.head_dim
    name = {"o_partial": "attn", "mlp_partial": "mlp_act"}.get(point, point)
    return torch.tensor([i * size + j for i in run.own(AT + name, rank) for j in range(size)])


def product(run, point, *, weight=None, bias=None, x=None, rows=None, whose=None):
    """The point on each rank: with another weight or bias (whole ones), input, or rows of them (of a rank)."""
    module, source = MODULES[point]
    weight = run.w(f"{MODEL}{module}.weight") if weight is None else weight
    bias = run.w(f"{MODEL}{module}.bias") if bias is None else bias
    held = []
    for rank in range(run.tp):
        here = features(run, point, rank) if rows is None else rows(rank)
        put = run.x(AT + source, rank).flatten(1) if x is None else x(rank)
        if point.endswith("partial"):
            held.append(put @ weight[:, here].T + (bias if rank == 0 else 0))
        else:
            y = F.linear(put, weight[here], bias[here])
            held.append(y.unflatten(1, (-1, run.config.head_dim)) if point in "qkv" else y)
    return held


def test_what_a_wrong_op_changes_is_made_anew_and_nothing_else(run):
    """The layer's input was not recorded, nor anything between k_rope and the summands."""
    hidden = ("output", "attn", "q_rope")
    case = run.case(AT + "o_partial", [run.x(AT + "o_partial", rank) + 1 for rank in range(2)], hide=hidden)
    case.expected(0)
    known = {name for name, rank in case.frame._values if rank == 0}
    assert {"layers.0.output", AT + "attn", AT + "q_rope", AT + "k_rope"} <= known
    for on, ranks in (((), (0, 1)), ((1,), (1,))):
        left = AlteredFrame(case.with_(ops=("q_rope",), on=on), None)._values.keys()
        gone = {(AT + point, rank) for point in ("q_rope", "attn") for rank in ranks}
        assert left == case.frame._values.keys() - gone


EVERY = pytest.mark.parametrize("point", MODULES)
COLUMNS = pytest.mark.parametrize("point", ["q", "k", "v", "gate", "up"])


@EVERY
def test_the_product_by_hand_is_right(run, point):
    for rank, held in enumerate(product(run, point)):
        assert torch.allclose(held.double(), run.case(AT + point, product(run, point)).expected(rank), atol=1e-5)


@EVERY
@pytest.mark.parametrize("times, fault", [(0, "bias_missing"), (2, "bias_twice")])
def test_a_bias_too_few_or_too_many(run, point, times, fault):
    module = MODULES[point][0]
    held = product(run, point, bias=times * run.w(f"{MODEL}{module}.bias"))
    if not times and point.endswith("partial"):  # then it is added to the sum
        return
    found = asked(run, asks_for("bias_missing", "bias_twice", "bias_first_rows"), held, AT + point)
    assert found.fault == fault


@COLUMNS
def test_a_bias_that_was_not_cut(run, point):
    bias = run.w(f"{MODEL}{MODULES[point][0]}.bias")
    held = product(run, point, bias=torch.zeros_like(bias))
    held = [x + bias[:x[0].numel()].view(x.shape[1:]) for x in held]
    found = asked(run, asks_for("bias_missing", "bias_twice", "bias_first_rows"), held, AT + point)
    assert found.fault == "bias_first_rows"


@pytest.mark.parametrize("point, module", [("o_proj", "self_attn.o_proj"), ("mlp", "mlp.down_proj")])
@pytest.mark.parametrize("times, fault", [(-1, "bias_missing"), (1, "bias_twice")])
def test_a_sum_without_its_bias(run, point, module, times, fault):
    held = run.changed(AT + point, lambda x, rank: x + times * run.w(f"{MODEL}{module}.bias"))
    found = asked(run, asks_for("bias_missing", "bias_twice"), held, AT + point)
    assert found.fault == fault


@EVERY
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_the_weight_of_another_layer(run, point, layer, bias):
    name = f"model.layers.{layer}.{MODULES[point][0]}"
    held = product(run, point, weight=run.w(f"{name}.weight"), bias=run.w(f"{name}.bias") if bias else None)
    found = asked(run, asks_for("wrong_layer"), held, AT + point)
    assert found.fault == "wrong_layer" and found.numbers == {"layer": layer}


def test_the_weight_of_another_module(run):
    weight, bias = (run.w(f"{MODEL}self_attn.o_proj.{what}") for what in ("weight", "bias"))
    held = product(run, "q", weight=weight, bias=bias)
    found = asked(run, asks_for("wrong_weight"), held, AT + "q")
    assert found.fault == "wrong_weight"
    for point, other in (("k", "v"), ("gate", "up")):  # these have names of their own
        weight, bias = (run.w(f"{MODEL}{MODULES[other][0]}.{what}") for what in ("weight", "bias"))
        case = run.case(AT + point, product(run, point, weight=weight, bias=bias))
        assert asks_for("wrong_weight")(case) is None


@pytest.mark.parametrize("point", ["q", "o_partial"])
def test_a_square_weight_read_the_other_way(run, point):
    weight = run.w(f"{MODEL}{MODULES[point][0]}.weight").T
    found = asked(run, asks_for("weight_transposed"), product(run, point, weight=weight), AT + point)
    assert found.fault == "weight_transposed"


@COLUMNS
@pytest.mark.parametrize("source, fault", [("before", "norm_skipped"), ("input_norm", "norm_wrong_input")])
def test_something_else_was_multiplied(run, point, source, fault):
    name = {"before": AT + "residual" if point in ("gate", "up") else "layers.0.output"}.get(source, AT + source)
    if name == AT + MODULES[point][1]:
        return  # that is what belongs there
    held = product(run, point, x=lambda rank: run.x(name, rank))
    found = asked(run, asks_for("norm_skipped"), held, AT + point)
    assert found.fault == fault


@EVERY
def test_a_weight_of_zeros(run, point):
    weight = torch.zeros_like(run.w(f"{MODEL}{MODULES[point][0]}.weight"))
    held = product(run, point, weight=weight)
    found = asked(run, asks_for("weight_not_loaded"), held, AT + point)
    assert found.fault == "weight_not_loaded"


@COLUMNS
def test_scales_of_the_first_rows(run, point):
    weight = run.w(f"{MODEL}{MODULES[point][0]}.weight")
    scale = weight.abs().amax(1, keepdim=True)
    changed = weight.clone()
    for rank in range(2):
        rows = features(run, point, rank)
        changed[rows] *= scale[:len(rows)] / scale[rows]
    held = product(run, point, weight=changed)
    found = asked(run, asks_for("channel_scales"), held, AT + point)
    assert found.fault == "channel_scales"
    held[0] = held[0] + 1
    assert asks_for("channel_scales")(run.case(AT + point, held)) is None, "rank 0 has the first rows"


# Which rows.

def test_keys_and_values_that_took_each_others_place(run):
    for point, other in (("k", "v"), ("v", "k")):
        held = [run.x(AT + other, rank) for rank in range(2)]
        assert asked(run, asks_for("qkv_order"), held, AT + point).fault == "qkv_order"


@pytest.mark.parametrize("point", ["k", "v"])
def test_the_first_kv_heads_on_every_rank(run, point):
    held = [run.x(AT + point, 0)] * 2
    found = asked(run, asks_for("kv_first_rows"), held, AT + point)
    assert found.fault == "kv_first_rows"
    assert asks_for("kv_replica_modulo")(run.case(AT + point, held)) is None, "there are more KV heads than ranks"


@COLUMNS
def test_a_fused_matrix_that_was_cut_as_one_block(run, point):
    parts = "qkv" if point in "qkv" else ("gate", "up")
    weight, bias = (torch.cat([run.w(f"{MODEL}{MODULES[part][0]}.{what}") for part in parts]) for what in ("weight",
                                                                                                          "bias"))
    def rows(rank):
        before = sum(len(features(run, part, rank)) for part in parts[:parts.index(point)])
        return (rank * len(weight) // 2 + before + torch.arange(len(features(run, point, rank)))) % len(weight)
    held = product(run, point, weight=weight, bias=bias, rows=rows)
    found = asked(run, asks_for("fused_one_block"), held, AT + point)
    named, cut = ("q|k|v", "Cut q, k and v apart") if point in "qkv" else ("gate|up", "Cut gate and up apart")
    assert found.fault == "fused_one_block"


@COLUMNS
def test_an_offset_that_was_divided_twice(run, point):
    def rows(rank):
        mine = features(run, point, rank)
        return mine - mine[0] + mine[0] // 2
    found = asked(run, asks_for("divided_twice"), product(run, point, rows=rows), AT + point)
    assert found.fault == "divided_twice"


@COLUMNS
def test_a_matrix_cut_along_its_inputs(run, point):
    weight = run.w(f"{MODEL}{MODULES[point][0]}.weight")
    held = product(run, point, weight=weight.reshape(weight.shape[1], weight.shape[0]).T)
    found = asked(run, asks_for("shard_dim1"), held, AT + point)
    assert found.fault == "shard_dim1"
    if point in "kv":  # beginning at whichever head
        held[1] = product(run, point, weight=weight.reshape(weight.shape[1], weight.shape[0]).T,
                          rows=lambda rank: torch.arange(6, 18))[1]
        assert asked(run, asks_for("shard_dim1"), held, AT + point).fault == "shard_dim1"


@pytest.mark.parametrize("point", ["q", "k", "v", "gate"])
def test_rows_written_as_columns(run, point):
    parts = "qkv" if point in "qkv" else ("gate", "up")
    held = []
    for rank in range(2):
        weight, bias = (torch.cat([run.w(f"{MODEL}{MODULES[part][0]}.{what}")[features(run, part, rank)]
                                   for part in parts]) for what in ("weight", "bias"))
        start = sum(len(features(run, part, rank)) for part in parts[:parts.index(point)])
        here = slice(start, start + len(features(run, point, rank)))
        y = F.linear(run.x(AT + MODULES[point][1], rank), weight.T.reshape(weight.shape)[here], bias[here])
        held.append(y.unflatten(1, (-1, DIM)) if point in "qkv" else y)
    found = asked(run, asks_for("qkv_written_by_column", "written_by_column"), held, AT + point)
    assert found.fault == ("qkv_written_by_column" if point in "qkv" else "written_by_column")


@pytest.mark.parametrize("rank, head, row, wanted", [(0, 1, 0, 48), (1, 3, 66, 60)])
def test_features_of_keys_that_stand_elsewhere(run, rank, head, row, wanted):
    """Rank 0's first key head is query head 0; rank 1's first is its other one."""
    held = [run.x(AT + "k", rank).clone() for rank in range(2)]
    held[rank][:, 0] = run.x(AT + "q", 0)[:, 0] if rank == 0 else run.x(AT + "k", 1)[:, 1]
    found = asked(run, in_other_places, held, AT + "k")
    assert found.fault is None and found.numbers == {"rank": rank, "row": row, "wanted": wanted}
    held[rank] = held[rank] + 1
    assert in_other_places(run.case(AT + "k", held)) is None


@pytest.mark.parametrize("places, says", [
    ({"q": "q0 q1 k0 v0", "k": "q2 q3", "v": "k1 v1"}, "it is filled group by group"),
    ({"q": "q0 q1 k0 k1", "k": "q2 v0", "v": "q3 v1"}, "it was read group by group")])
@pytest.mark.parametrize("point", ["q", "k", "v"])
def test_heads_that_stand_group_by_group(run, places, says, point):
    """What stands in each place of a rank's q, k and v; a rank has 4 query heads and 2 KV heads."""
    held = [torch.stack([run.x(AT + part, rank)[:, int(head)] for part, head in places[point].split()], 1)
            for rank in range(2)]
    found = asked(run, asks_for("qkv_interleaved"), held, AT + point)
    assert found.fault == "qkv_interleaved" and says in found.sentence


# The MLP.

@pytest.mark.parametrize("point, other", [("gate", "up"), ("up", "gate")])
def test_gate_in_the_place_of_up(run, point, other):
    found = asked(run, asks_for("gate_up_order"), product(run, other), AT + point)
    assert found.fault == "gate_up_order"


@pytest.mark.parametrize("wrong, rank, row, wanted", [
    ({1: {0: 7}}, 1, 7, 22), ({0: {3: 42, 5: 1}}, 0, 42, 3), ({0: {4: 2}, 1: {2: 0}}, 0, 2, 4)])
def test_features_of_gate_that_stand_elsewhere(run, wrong, rank, row, wanted):
    """``{rank: {place there: feature}}``."""
    def rows(rank):
        mine = features(run, "gate", rank)
        for place, feature in wrong.get(rank, {}).items():
            mine[place] = feature
        return mine
    held = product(run, "gate", rows=rows)
    found = asked(run, asks_for("mlp_columns"), held, AT + "gate")
    assert found.fault == "mlp_columns" and found.numbers == {"rank": rank, "row": row, "wanted": wanted}
    held[rank][0, 1] += 1
    assert asks_for("mlp_columns")(run.case(AT + "gate", held)) is None


ACTS = {"gelu": F.gelu, "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu²": lambda x: F.relu(x).square(), "no activation": lambda x: x}
COMBINED = {f"{name}(gate) × up": lambda g, u, act=act: act(g) * u for name, act in ACTS.items()} | {
    "silu(gate), up left out": lambda g, u: F.silu(g), "silu(up), gate left out": lambda g, u: F.silu(u),
    "silu(gate) × silu(up)": lambda g, u: F.silu(g) * F.silu(u), "silu(gate × up)": lambda g, u: F.silu(g * u),
    "silu(gate) + up": lambda g, u: F.silu(g) + u}


@pytest.mark.parametrize("says", COMBINED)
def test_another_activation(run, says):
    held = [COMBINED[says](g, u) for g, u in zip(product(run, "gate"), product(run, "up"))]
    found = asked(run, asks_for("wrong_activation"), held, AT + "mlp_act")
    assert found.fault == "wrong_activation"


def test_gate_and_up_exchanged_or_in_turns(run):
    gate, up = product(run, "gate"), product(run, "up")
    found = asked(run, asks_for("gate_up_order"), [F.silu(u) * g for g, u in zip(gate, up)], AT + "mlp_act")
    assert found.fault == "gate_up_order"
    fused = [torch.cat(pair, 1) for pair in zip(gate, up)]
    held = [F.silu(f[:, 0::2]) * f[:, 1::2] for f in fused]
    found = asked(run, asks_for("gate_up_interleaved"), held, AT + "mlp_act")
    turns = [torch.stack(pair, -1).flatten(1).chunk(2, 1) for pair in zip(gate, up)]
    found = asked(run, asks_for("gate_up_interleaved"), [F.silu(a) * b for a, b in turns], AT + "mlp_act")
