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
    made: Any = nn.Parameter(data, requires_grad=False)
    owner = weakref.proxy(layer)  # the layer itself would be a reference cycle, which only the garbage collector frees
    made.ranges, made.shard_dim, made.weight_loader = tuple(ranges), dim, lambda *sources: owner.load(kind, *sources)
    return made
