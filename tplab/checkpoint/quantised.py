"""Weights that are stored in eight bits with scales beside them: read and widened, slice by slice.

Two layouts: blocks of a matrix with a scale each (``weight_scale_inv``, the fp8 of DeepSeek and Qwen), and a scale for
each row (``weight_scale``, int8 or fp8 of compressed-tensors). Weights are widened; activations are not quantised.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import CheckpointError
from .headers import NARROW, TensorInfo

_SUFFIXES = ("_scale_inv", "_scale")


class Scale(NamedTuple):
    """The scales of one tensor: ``info`` says where they are, ``block`` how many rows and columns share one."""

    name: str
    info: TensorInfo
    block: tuple[int, int]


def scale_block(quantisation: Any) -> tuple[int, int] | None:
    """How many rows and columns share a scale, by a ``quantization_config``; 0: all of them. None: another layout."""
    match quantisation:
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if rows > 0 < columns:
            return rows, columns
        case {"quant_method": "compressed-tensors", "config_groups": dict(groups)} if groups:
            for group in groups.values():
                match group:
                    case {"weights": {"num_bits": 8, "strategy": "channel", **more}} if more.get("symmetric", True):
                        continue
                return None
            return 1, 0
    return None


def with_scales(folder: Path, tensors: Mapping[str, TensorInfo], block: tuple[int, int] | None
                ) -> dict[str, TensorInfo]:
    """The tensors without their scales: each quantised one knows its own, and is float32 from outside.

    Raises ``CheckpointError`` for a quantised tensor whose scales are missing or of another shape.
    """
    others, scales = dict(tensors), {}
    for name, info in tensors.items():
        if info.dtype not in NARROW:
            continue
        scale = next((name + suffix for suffix in _SUFFIXES if name + suffix in tensors), None)
        if block is None or scale is None or len(info.shape) != 2:
            raise CheckpointError(f"{folder}: {name} in {info.file} is stored as {str(info.dtype)[6:]}; that is read "
                                  "only for matrices, with their scales and with a quantization_config that says how "
                                  "many rows and columns share one")
        sizes = tuple(size or whole for size, whole in zip(block, info.shape))
        expected = tuple(-(-whole // size) for whole, size in zip(info.shape, sizes))
        if tensors[scale].shape != expected:
            raise CheckpointError(f"{folder}: {scale} has shape {list(tensors[scale].shape)}, but {list(expected)} "
                                  f"blocks of {list(sizes)} cover {name}")
        scales[name] = Scale(scale, others.pop(scale), sizes)
    return others | {name: replace(tensors[name], dtype=torch.float32, scale=scale) for name, scale in scales.items()}


def widened(piece: torch.Tensor, index: tuple[slice, ...], scale: Scale, take) -> torch.Tensor:
    """A slice of a quantised tensor in float32; ``take(name, info, index)`` reads the scales of its blocks.

    The slice may begin and end inside of blocks: a shard's edge need not be a block's.
    """
    index = (*index, *(slice(0, scale.info.shape[dim] * scale.block[dim]) for dim in range(len(index), 2)))
    blocks = tuple(slice(part.start // size, -(-part.stop // size)) for part, size in zip(index, scale.block))
    factors = take(scale.name, scale.info, blocks).float()
    for dim, (part, size) in enumerate(zip(index, scale.block)):
        factors = factors.repeat_interleave(size, dim).narrow(dim, part.start % size, piece.shape[dim])
    return piece.float() * factors
