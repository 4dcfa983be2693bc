"""What the search cuts short: it says the same as if every guess were made anew, whole, and measured to the end."""

import pytest
from helpers.real_cases import AT, RealRun

from tplab.align.diagnose.altered import AlteredFrame, At, by_row, compound, misfit
from tplab.align.diagnose.mistakes import TABLE
from tplab.align.diagnose.table import Changed, Family
from tplab.align.points import LAYER_POINTS

SHOWN = {"the layer alone": ("output",), "attention": ("q_rope", "k_rope", "v", "attn", "output"),
         "keys": ("k_rope", "output"), "around the summands": ("before", "o_partial", "residual", "output")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RealRun(tmp_path_factory.mktemp("model") / "m", layers=2, heads=6, kv_heads=2, head_dim=4, hidden=24,
                   attention_bias=True)


def case_of(run, seen, point, held):
    """The last two tokens of each text came one by one."""
    return run.case(AT + point, held, hide={*LAYER_POINTS} - {*SHOWN[seen]},
                    num_keys=[5, 5, 5, 5, 5, 6, 7, 3, 3, 3, 4, 5])


def measured(case, change):
    gaps = []
    for rank in case.wrong_ranks:
        guess = At(case, rank, AlteredFrame(case, change), case.op)(case.point)
        off, scale = by_row(case.shard(case.point, rank), guess)
        gaps.append((off.max() / scale.max()).item())
    return max(gaps)


def changes(ops):
    families = (one for one in TABLE if isinstance(one, Family) and ops[0] in one.subjects)
    return [one for family in families for one in family.mistakes]


@pytest.mark.parametrize("seen, point, op, name, words", [
    ("the layer alone", "output", "k_rope", "rope_direction", None),
    ("the layer alone", "output", "k_rope", "rope_direction", "in decode calls only"),
    ("the layer alone", "output", "post_norm", "norm_weight_missing", "in decode calls only"),
    ("attention", "attn", "attn", "softmax_scale", "in decode calls only"), ("keys", "output", "v", "bias_twice", None),
    ("around the summands", "o_partial", "attn", "softmax_scale", "in calls of several tokens only")])
def test_what_is_cut_short_says_the_same(run, seen, point, op, name, words):
    right, fitting = case_of(run, seen, point, run.changed(AT + point, lambda x, rank: x + 1)), set()
    bug = next(Changed(one, value) for one in changes([op]) if one.name == name for value in one.candidates(right))
    rows = {None: None} | {one.words: one.rows for one in right.scopes()}
    broken = right.with_(ops=(op,), scope=rows[words])
    case = case_of(run, seen, point, [AlteredFrame(broken, bug).expected(AT + point, rank) for rank in range(2)])
    for number, ops in enumerate(compound(case)):
        for where, on in ((None, ()), (rows["in decode calls only"], ()), (case.guilty_rows, ()), (None, (1,))):
            about = case.with_(ops=ops, scope=where, on=on)
            asked = {Changed(one, next(iter(one.candidates(about)))) for one in changes(ops)[number % 3::3]
                     if one.when(about) and one.candidates(about)} | ({bug} if ops == (op,) else set())
            for change in asked if point == "output" or not on else ():
                short, whole = misfit(about, change), measured(about, change)
                assert short == whole if whole <= case.tolerance else short > case.tolerance, (ops, on, change)
                fitting |= {change} if whole <= case.tolerance else set()
    assert bug in fitting
