"""Hypotheses about the two terms of a rotation, ``x · cos + other half · sin``: exchanged, lost, laid out otherwise."""

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import before_rope, best, rotated, tables


def _other(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _viewed(x: torch.Tensor, turn, back: bool) -> torch.Tensor:
    tokens, heads, dim = x.shape
    turned = turn(x.reshape(heads, tokens, dim).transpose(0, 1))
    return turned.transpose(0, 1).reshape(x.shape) if back else turned


@hypothesis("q_rope", "k_rope")
def terms_of_the_rotation(case: Case) -> Diagnosis | None:
    """Are cos and sin exchanged, is a term or a sign lost, or do the tables not fit the halves?"""
    theta, size = case.config.hf.rope_parameters["rope_theta"], case.config.head_dim
    half = size // 2

    def terms(change):
        def op_of(at, op):
            x = before_rope(at, op)
            return change(x, *(table[0, :, None] for table in tables(at)))
        return op_of

    def in_pairs(table):
        return table[..., :half].repeat_interleave(2, -1)

    def upwards(at, op):
        angles = at.frame.positions[:, None] * (theta ** (torch.arange(0, size, 2) / size)).repeat(2)
        x = before_rope(at, op)
        return rotated(case, x, *(table[None].to(x.dtype) for table in (angles.cos(), angles.sin())))
    found = best(case, {
        "cos and sin have changed places": terms(lambda x, cos, sin: x * sin + _other(x) * cos),
        "it is multiplied with cos, and the sine's part is missing": terms(lambda x, cos, sin: x * cos),
        "the cosine's part is missing": terms(lambda x, cos, sin: _other(x) * sin),
        "the other half comes in without its sign, which mirrors and does not turn":
            terms(lambda x, cos, sin: x * cos + x.roll(half, -1) * sin),
        "the halves are turned by tables that were laid out for pairs of neighbours":
            terms(lambda x, cos, sin: x * in_pairs(cos) + _other(x) * in_pairs(sin)),
        "theta's exponents have the wrong sign, so the later pairs are the faster ones": upwards,
    })
    if found is not None:
        return case.diagnosis("rope_terms", f"{case.op} is not what the checkpoint's RoPE gives: {found}.")


@hypothesis("q_rope", "k_rope")
def viewed_where_transposed(case: Case) -> Diagnosis | None:
    """Did a view or a reshape stand where heads and tokens are to be exchanged?"""
    def whole(change):
        def op_of(at, op):
            x = before_rope(at, op)
            cos, sin = tables(at)
            return change(x, lambda y: rotated(case, y, cos, sin))
        return op_of
    found = best(case, {
        "before the rotation and behind it": whole(lambda x, turn: _viewed(x, turn, back=True)),
        "before the rotation": whole(lambda x, turn: _viewed(x, turn, back=False)),
        "behind the rotation": whole(lambda x, turn: turn(x).transpose(0, 1).reshape(x.shape)),
    })
    if found is not None:
        return case.diagnosis("rope_viewed", f"{case.op} is turned with numbers of other tokens: {found}, a view or "
                              "reshape stands where a transpose exchanges heads and tokens.")
