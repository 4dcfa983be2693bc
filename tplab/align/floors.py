"""The rounding floors: how far two correct computations of the same thing may stand apart.

A point is *inside the floor* when ``max |tplab - HF| <= floor * max |HF|`` at that point: the difference is measured
against the reference's own scale. The numbers are upper bounds of what was measured on correct models, not wishes;
``LOGITS`` bounds the logits absolutely as well.
"""

import torch

from tplab.errors import TplabError

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
RELATIVE = {torch.float32: 2e-5, torch.float64: 2e-7, torch.bfloat16: 5e-2}
LOGITS = {torch.float32: 1e-4, torch.float64: 1e-7, torch.bfloat16: float("inf")}


class DtypeError(TplabError):
    """A dtype that the lab has no floor for."""


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"float32"``, ``"float64"``, ``"bfloat16"`` or the torch dtype itself → the torch dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise DtypeError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def inside(name: str, max_abs: float, scale: float, dtype: torch.dtype) -> bool:
    """Whether a difference at a trace point is explained by rounding."""
    bound = RELATIVE[dtype] * scale
    return max_abs <= (min(bound, LOGITS[dtype]) if name == "logits" else bound)
