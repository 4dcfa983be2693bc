"""Recorded weights: the rows or columns of a checkpoint tensor that each should be, and whether it is.

This checks loading and slicing without a forward pass.
"""

import torch

from tplab.align.check.fused import Fused
from tplab.align.check.match import GROUP_OF, PARTS, Indices, match, real_items, usual_shares
from tplab.align.check.names import role_in, split_name
from tplab.align.check.shares import ROWS, Shares
from tplab.align.local import Weights
from tplab.align.points import POINTS, columns_of
from tplab.align.recording import Parameter, Recording
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING, HEAD

_LINEAR = [part for parts in PARTS.values() for part in parts]
_COLUMNS = 16  # columns of a weight that are compared to find its rows


def parameters_of(recorded, shares: Shares) -> tuple[list[dict[str, Parameter] | None], list[str]]:
    """Per rank, checkpoint name → :class:`Parameter`, None for a rank that recorded none; and the names of weights
    that are no tensor of the checkpoint.

    A weight's share is the one that the activations show; where no activation was recorded, the weights' own labels
    count. A weight of another size is kept with the share that it should have, so that the comparison shows it.
    """
    held = [known.parameters if known else {} for known in recorded.ranks]
    for rank, entries in enumerate(held):
        for name, entry in entries.items():
            for part, rows in _parts(shares, name, entry, rank)[1].items() if split_name(name)[0] == 0 else ():
                full, dim = shares.expected.weight(f"model.layers.0.{POINTS[part].module}.weight"), shares.dim(part)
                if rows.shape[1:] == full.shape[1:] and len(rows) % dim == 0:
                    local, full = (w[:, :_COLUMNS].T.float().unflatten(1, (-1, dim)) for w in (rows, full))
                    shares.vote_by_weight(GROUP_OF[part], rank, local, full)
    found, unknown = [], {}
    for rank, entries in enumerate(held):
        pieces: dict[str, Parameter] = {}
        for name, entry in entries.items():
            own = _pieces(shares, name, entry, rank)
            pieces |= own
            if not own and entry.dtype.is_floating_point and name.endswith((".weight", ".bias")):
                unknown[name] = None
        found.append(pieces or None)
    return found, list(unknown)


def _parts(shares: Shares, name: str, entry, rank: int) -> tuple[str, dict[str, torch.Tensor]]:
    """``(role, {part: its rows})`` of a recorded weight or bias; the role is ``""`` where it has none."""
    module, _, kind = name.rpartition(".")
    layer, rest = split_name(module)
    role = role_in(shares.sources.config, layer, rest)
    if role is None or kind not in ("weight", "bias") or (layer or 0) >= shares.config.num_layers or (
            len(entry.shape) not in (1, 2)):
        return "", {}
    if role not in PARTS:
        return role, {role: entry.tensor()} if role in _LINEAR else {}
    tensor, split = entry.tensor(), shares.splits[role]
    cut = split.parts[rank] if split.widths[rank] == len(tensor) else None
    cut = cut or Fused(shares, role).by_size(len(tensor), rank)
    return (role, {part: tensor[rows] for part, rows in cut.items()}) if cut else ("", {})


def _pieces(shares: Shares, name: str, entry, rank: int) -> dict[str, Parameter]:
    """By the checkpoint's names, everything that is stacked in one recorded weight or bias."""
    (role, parts), layer, kind, found = _parts(shares, name, entry, rank), split_name(name)[0], name.rsplit(".")[-1], {}

    def target(point: str) -> str:
        return f"{shares.expected.module(point, layer)}.{kind}"
    if role in POINTS and POINTS[role].op == "norm" and kind == "weight":
        found[target(role)] = Parameter(entry.tensor())
    elif role in ROWS:
        (partial, source, group), tensor = ROWS[role], entry.tensor()
        if kind == "weight":
            found[target(partial)] = _share(tensor, 1, shares.layouts[group].indices[rank], shares.dim(source))
        elif shares.expected.weight(target(partial)) is not None and not (rank and not tensor.any()):
            found[target(partial)] = Parameter(tensor)  # added once: the other ranks may hold zeros
    elif role in ("embed", "head") and kind == "weight":
        name, tensor, total = EMBEDDING if role == "embed" else HEAD, entry.tensor(), shares.totals["vocab"]
        usual = [shares.planned["vocab"][rank], *usual_shares(total, len(tensor), *shares.in_stage(rank))]
        columns = [w[:, :_COLUMNS].T[..., None] for w in (tensor, shares.expected.weight(name)) if tensor.dim() == 2]
        found[name] = _share(tensor, 0, columns and match(*columns, usual, search=False) or usual[0], 1)
    for part, rows in parts.items():
        if part in shares.orders:
            rows = rows.unflatten(0, (-1, shares.dim(part)))[:, shares.orders[part]].flatten(0, 1)
        if shares.expected.weight(target(part)) is not None:
            indices = shares.layouts[GROUP_OF[part]].indices[rank]
            found[target(part)] = _share(rows, 0, indices, shares.dim(part))
    return found


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
    weights, wrong = {}, {}
    for rank, held in enumerate(recording.parameters):
        for name, (ours, dim, indices) in (held or {}).items():
            # A norm's weight may be float32 in a bfloat16 engine: as in the file, or rounded to bfloat16 before.
            for dtype in dict.fromkeys((recording.dtype, ours.dtype)):
                tensors = weights.setdefault(dtype, Weights(ckpt, dtype, dtype))
                tied = name == HEAD and name not in tensors.parts
                right = tensors.raw(EMBEDDING if tied else name).to(ours.dtype)
                if dim is not None:
                    right = right.index_select(dim, torch.tensor(list(indices), dtype=torch.long))
                if torch.equal(ours, right):
                    break
            else:
                wrong[f"rank {rank}: {name}"] = (
                    f"shape {list(ours.shape)}, not {list(right.shape)}" if ours.shape != right.shape else
                    f"{(ours != right).double().mean().item():.0%} of its numbers are not the checkpoint's")
    return wrong
