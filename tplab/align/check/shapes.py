"""Recorded tensors of any shape → ``[rows, heads, head_dim]`` or ``[rows, columns]``."""

import torch

from tplab.align.check.rows import CallRows

FLAT, AFTER, BEFORE = "heads in one dimension", "heads after tokens", "heads before tokens"


def as_rows(tensor: torch.Tensor, call: CallRows) -> torch.Tensor | None:
    """``[rows, columns]`` of a whole call, or of the last row of each of its texts; None if it has other rows."""
    if tensor.dim() < 2:
        return None
    *front, columns = tensor.shape
    if len(front) == 2 and front == [call.tokens, call.batch] and call.tokens != call.batch:
        tensor = tensor.transpose(0, 1)
    rows = tensor.numel() // max(columns, 1)
    return tensor.reshape(rows, columns) if rows in (call.size, len(call.ends)) else None


def as_heads(tensor: torch.Tensor, call: CallRows, head_dim: int) -> dict[str, torch.Tensor]:
    """Every way in which a tensor can be ``[call.size, heads, head_dim]``, the usual ones first.

    A tensor with the keys of the whole cache is taken for its last rows, where all texts are of one length.
    """
    if tensor.dim() < 2 or tensor.shape[-1] % head_dim or not tensor.numel():
        return {}
    ways = {}
    *front, columns = tensor.shape
    if tensor.numel() // columns == call.size:
        ways[FLAT] = tensor.reshape(call.size, columns // head_dim, head_dim)
    if columns == head_dim and tensor.dim() in (3, 4):
        lines = tensor if tensor.dim() == 4 else tensor[None]
        if len(lines) != call.batch and tensor.dim() == 3 and tensor.shape[0] == call.size:
            lines = tensor.reshape(call.batch, call.tokens, *tensor.shape[1:])
        keys = call.keys[0] if len(set(call.keys)) == 1 and len(call.rows) == call.size else call.tokens
        for way, heads_first in ((AFTER, False), (BEFORE, True)):
            lined = lines.transpose(1, 2) if heads_first else lines  # [batch, tokens, heads, head_dim]
            if len(lined) == call.batch and lined.shape[1] in (call.tokens, keys):
                ways[way] = lined[:, -call.tokens:].reshape(call.size, lined.shape[2], head_dim)
    return ways
