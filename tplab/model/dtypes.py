"""The dtypes the lab works in."""

import torch

from tplab.errors import TplabError

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"float32"``, ``"float64"``, ``"bfloat16"`` or the torch dtype itself → the torch dtype; TplabError."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TplabError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]
