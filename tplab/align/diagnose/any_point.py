"""Mistakes that can stand at any point: rows of other tokens, too few digits."""

from collections.abc import Callable
from dataclasses import replace

import torch

from tplab.align.diagnose.altered import IMPOSSIBLE, At, by_row, coarser, in_calls, rounded
from tplab.align.diagnose.table import Family, Mistake
from tplab.align.points import POINTS

BESIDE = ((1, "before"), (-1, "behind"))  # by how much rows are rolled, and for which token each is right then


def _shifts(name: str, when: Callable) -> Mistake:
    return Mistake(name, "Each row of {name} is right for the token {text} it.",
                   lambda at, value: in_calls(at.case, at.expected(), lambda x: x.roll(value[0], 0), value[1]),
                   {(shift, apart): where for shift, where in BESIDE for apart in (False, True)}, numbers="shift",
                   when=lambda case: len(case.positions) > 2 and when(case))


def _in_digits_of(at: At, dtype: torch.dtype) -> torch.Tensor:
    """The rows that the rank holds, if every number is one of this dtype's, and right as far as the dtype goes."""
    held = at.held()
    off, scale = by_row(held, at.expected())
    fits = (rounded(held, dtype) == held).flatten(1).all(1) & (off < 4 * torch.finfo(dtype).eps * scale)
    return torch.where(fits.view(-1, *[1] * (held.dim() - 1)), held, IMPOSSIBLE)


FEW_DIGITS = Mistake(
    "low_precision", "{name} is right as far as {text} goes, and every number of it is one of {text}'s: it was "
    "computed, or passed on, in {text}.", _in_digits_of, coarser)


AT_ANY_POINT = (
    Family(tuple(POINTS), _shifts("ids_shifted", lambda case: case.point == "embed"),
           _shifts("rows_shifted", lambda case: case.point != "embed"), own=True),
    Family(tuple(POINTS), Mistake(
        "low_precision", "{name} fits {op} in {text}: it was computed, or passed on, with so few digits.",
        lambda at, dtype: rounded(at.expected(), dtype), coarser, when=lambda case: case.op != case.point)),
    Family("router_logits", replace(
        FEW_DIGITS, name="router_low_precision", says=FEW_DIGITS.says + " Which expert is the last that a token goes "
        "to may depend on these digits."), own=True),
    Family(tuple(POINTS), FEW_DIGITS, own=True),
)
