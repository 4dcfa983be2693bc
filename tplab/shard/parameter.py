"""Parameters that know which slices of a checkpoint they hold, and can load them."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def sharded_parameter(layer: nn.Module, kind: str, data: torch.Tensor, ranges: Sequence[range], dim: int = 0
                      ) -> nn.Parameter:
    """An empty parameter of ``layer`` that stacks one of ``ranges`` of each of its checkpoint tensors along ``dim``.

    ``parameter.weight_loader(*sources)`` fills it, as in vLLM: it is ``layer.load(kind, *sources)``.
    """
    parameter: Any = nn.Parameter(data, requires_grad=False)
    owner = weakref.proxy(layer)  # the layer itself would be a reference cycle, which only the garbage collector frees
    parameter.ranges, parameter.shard_dim = tuple(ranges), dim
    parameter.weight_loader = lambda *sources: owner.load(kind, *sources)
    return parameter
