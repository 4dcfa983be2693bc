"""Recorded weights: the rows or columns of a checkpoint tensor that each should be, and whether it is.

This checks loading and slicing without a forward pass.
"""

import torch

from tplab.align.check.match import GROUP_OF, PARTS, Indices, real_items
from tplab.align.check.names import role_in, split_name
from tplab.align.check.shares import ROWS, Shares
from tplab.align.points import POINTS, as_index, columns_of
from tplab.align.recording import Parameter, Recording
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING, EXPERTS, HEAD, read_part, tensor_parts

_LINEAR = sum(PARTS.values(), ())
_OUTER = {"embed": EMBEDDING, "head": HEAD}


def parameters_of(recorded, shares: Shares, ckpt: Checkpoint) -> tuple[list[dict[str, Parameter] | None], list[str]]:
    """Per rank, checkpoint name → :class:`Parameter`, None for a rank that recorded none; and the names of weights
    that are no tensor of the checkpoint. A weight of another size is kept with the share that it should have, so that
    the comparison shows it."""
    by_rank, unknown, stored = [], {}, tensor_parts(ckpt.config, ckpt.tensors)
    for rank, known in enumerate(recorded.ranks):
        pieces: dict[str, Parameter] = {}
        for name, entry in (known.parameters if known else {}).items():
            counts = {other: other_rank.parameters[name].shape[0] for other, other_rank in enumerate(recorded.ranks)
                      if other_rank and name in other_rank.parameters}
            of_weight = _pieces(shares, stored, name, entry, rank, counts)
            pieces |= of_weight
            if not of_weight and entry.dtype.is_floating_point and name.endswith((".weight", ".bias")):
                unknown[name] = None
        by_rank.append(pieces or None)
    return by_rank, list(unknown)


def _pieces(shares: Shares, stored, name: str, entry, rank: int, counts: dict[int, int]) -> dict[str, Parameter]:
    """By the checkpoint's names, everything that is stacked in one recorded weight or bias; ``counts``: its rows on
    each rank."""
    module, _, kind = name.rpartition(".")
    layer, rest = split_name(module)
    role, config = role_in(shares.sources.config, layer, rest), shares.config
    if role is None or kind not in ("weight", "bias") or (layer or 0) >= config.num_layers or len(entry.shape) > 2:
        return {}

    def target(point: str) -> str:
        name = EXPERTS[config.experts.stored][0] if point == "router_logits" else POINTS[point].module
        at = "" if layer is None else f"model.layers.{layer}."
        return f"{at}{dict(config.norms).get(name, name)}.{kind}"
    tensor = entry.tensor()
    if role in POINTS and POINTS[role].op == "norm" and kind == "weight":
        return {target(role): Parameter(tensor)}
    if role in _OUTER and kind == "weight":
        rows = shares.share("vocab", counts).get(rank, shares.planned["vocab"][rank])
        return {_OUTER[role]: _share(tensor, 0, rows, 1)}
    if role in ROWS:
        partial, source, group = ROWS[role]
        if kind == "weight":
            return {target(partial): _share(tensor, 1, shares.layouts[group][rank], shares.dim(source))}
        added = target(partial) in stored and not (rank and not tensor.any())  # once: the other ranks may hold zeros
        return {target(partial): Parameter(tensor)} if added else {}
    cut = shares.by_size(role, len(tensor), rank) if role in PARTS else {role: range(len(tensor))}
    pieces = {}
    for part, rows in (cut or {}).items():
        if part in _LINEAR and target(part) in stored:
            weight = tensor[as_index(rows)]
            if part in ("q", "k") and "pairs" in shares.told_layouts:
                weight = weight.unflatten(0, (-1, shares.dim(part) // 2, 2)).transpose(1, 2).flatten(0, 2)
            pieces[target(part)] = _share(weight, 0, shares.layouts[GROUP_OF[part]][rank], shares.dim(part))
    return pieces


def _share(tensor: torch.Tensor, dim: int, indices: Indices | None, size: int) -> Parameter:
    """A recorded tensor with the part of the checkpoint's that it should be; padding is dropped."""
    if indices is None:
        return Parameter(tensor)
    kept, real = real_items(indices)
    if dim < tensor.dim() and tensor.shape[dim] == len(indices) * size > len(kept) * size:
        tensor = tensor.index_select(dim, torch.tensor(columns_of(kept, size)))
    return Parameter(tensor, dim, tuple(columns_of(real, size)))


def wrong_parameters(recording: Recording, ckpt: Checkpoint) -> dict[str, str]:
    """``{"rank 1: tensor's name": what is wrong}``; empty where all weights are the checkpoint's bit for bit."""
    parts, wrong = tensor_parts(ckpt.config, ckpt.tensors), {}
    held_by_ranks = [(rank, *item) for rank, held in enumerate(recording.parameters) for item in (held or {}).items()]
    with ckpt.reader() as reader:
        for rank, name, (ours, dim, indices) in held_by_ranks:
            whole = read_part(parts[EMBEDDING if name == HEAD and name not in parts else name], reader)
            # A norm's weight may be float32 in a bfloat16 engine: as in the file, or rounded to bfloat16 before.
            rights = [whole.to(dtype).to(ours.dtype) for dtype in dict.fromkeys((recording.dtype, ours.dtype))]
            if dim is not None:
                rights = [right.index_select(dim, torch.tensor(list(indices), dtype=torch.long)) for right in rights]
            if not any(torch.equal(ours, right) for right in rights):
                wrong[f"rank {rank}: {name}"] = (
                    f"shape {list(ours.shape)}, not {list(rights[-1].shape)}" if ours.shape != rights[-1].shape else
                    f"{(ours != rights[-1]).double().mean().item():.0%} of its numbers are not the checkpoint's")
    return wrong
