"""The weights that a rank recorded: which rows or columns of which tensor they should be, and whether they are.

So loading and slicing are checked without running anything.
"""

from collections.abc import Iterator

import torch

from tplab.align.check.layouts import PADDING, Indices, candidates, fit
from tplab.align.check.names import place_of, role_of
from tplab.align.check.shares import Shares
from tplab.align.local import Weights
from tplab.align.recording import Parameter, Recording
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING, HEAD

_WHOLE = {"norm": "model.norm", "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm",
          "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_PARTS = {"qkv": ("q", "k", "v"), "q": ("q",), "k": ("k",), "v": ("v",), "gate_up": ("gate", "up"), "gate": ("gate",),
          "up": ("up",)}
_ROWS = {"o": ("self_attn.o_proj", "q"), "down": ("mlp.down_proj", "mlp")}
_COLUMNS = 16  # of a weight's input that are compared to find out which rows it holds


def parameters_of(recorded, shares: Shares) -> tuple[list[dict[str, Parameter] | None], list[str]]:
    """Per rank, checkpoint name → :class:`Parameter`, None for a rank that recorded none; and the names of weights
    that are no tensor of the checkpoint.

    A weight's share is the one that the activations showed; where none were recorded, the weights are asked in the
    same way. A weight of another size is handed on with the share it should have, for the comparison to see.
    """
    found, unknown = [], {}
    held = [known.parameters if known else {} for known in recorded.ranks]
    _vote(held, shares)
    for rank, entries in enumerate(held):
        pieces: dict[str, Parameter] = {}
        for name, entry in entries.items():
            own = dict(_pieces(shares, name, entry, rank))
            pieces |= own
            if not own and entry.dtype.is_floating_point and name.endswith((".weight", ".bias")):
                unknown[name] = None
        found.append(pieces or None)
    return found, list(unknown)


def _parts(shares: Shares, name: str, entry, rank: int) -> tuple[str, str, dict[str, torch.Tensor]]:
    """``(role, "weight" or "bias", {part: its rows})`` of a recorded weight; the role is ``""`` where it has none."""
    module, _, kind = name.rpartition(".")
    layer, rest = place_of(module)
    role = role_of(layer, rest)
    if role is None or kind not in ("weight", "bias") or (layer or 0) >= shares.config.num_layers or (
            len(entry.shape) not in (1, 2)):
        return "", kind, {}
    tensor = entry.tensor()
    parts = _PARTS.get(role, ())
    if len(parts) < 2:
        return role, kind, dict.fromkeys(parts, tensor)
    dim = shares.config.head_dim if role == "qkv" else 1
    sizes = [len(shares.planned[_group(part)][rank]) * dim for part in parts]
    split = shares.splits[role]
    if split.parts[rank] is not None and split.widths[rank] == len(tensor):
        return role, kind, {part: tensor[rows] for part, rows in split.parts[rank].items()}
    if role == "gate_up" and len(tensor) % 2 == 0:  # as wide as each other, whatever the plan says
        sizes = [len(tensor) // 2] * 2
    return (role, kind, dict(zip(parts, tensor.split(sizes)))) if sum(sizes) == len(tensor) else ("", kind, {})


def _group(part: str) -> str:
    return "mlp" if part in ("gate", "up") else part


def _vote(held: list[dict], shares: Shares) -> None:
    """Where no activation says which rows a rank holds, let its weights say it."""
    for rank, entries in enumerate(held):
        for name, entry in entries.items():
            if place_of(name)[0] == 0:
                _, kind, parts = _parts(shares, name, entry, rank)
                for part, rows in parts.items() if kind == "weight" else ():
                    dim = 1 if _group(part) == "mlp" else shares.config.head_dim
                    module = "mlp" if dim == 1 else "self_attn"
                    full = shares.evidence.weight(f"model.layers.0.{module}.{part}_proj.weight")
                    if rows.shape[1] == full.shape[1] and len(rows) % dim == 0:
                        local, full = (w[:, :_COLUMNS].T.float().unflatten(1, (-1, dim)) for w in (rows, full))
                        shares.vote_by_weight(_group(part), rank, local, full)


def _pieces(shares: Shares, name: str, entry, rank: int) -> Iterator[tuple[str, Parameter]]:
    """``(checkpoint name, Parameter)`` of everything that is stacked in one recorded weight or bias."""
    role, kind, parts = _parts(shares, name, entry, rank)
    at = f"model.layers.{place_of(name)[0]}."
    for part, rows in parts.items():
        module = "mlp" if _group(part) == "mlp" else "self_attn"
        dim = 1 if _group(part) == "mlp" else shares.config.head_dim
        target = f"{at}{module}.{part}_proj.{kind}"
        if part in shares.orders:
            rows = rows.unflatten(0, (-1, dim))[:, shares.orders[part]].flatten(0, 1)
        if shares.evidence.weight(target) is not None:
            yield target, _share(rows, 0, shares.layouts[_group(part)].indices[rank], dim)
    if role in _ROWS:
        module, group = _ROWS[role]
        tensor = entry.tensor()
        if kind == "weight":
            dim = 1 if group == "mlp" else shares.config.head_dim
            yield f"{at}{module}.weight", _share(tensor, 1, shares.layouts[group].indices[rank], dim)
        elif shares.evidence.weight(f"{at}{module}.bias") is not None and not (rank and not tensor.any()):
            yield f"{at}{module}.bias", Parameter(tensor)  # added once: the other ranks may hold zeros
    elif role in _WHOLE and kind == "weight":
        yield f"{'' if role == 'norm' else at}{_WHOLE[role]}.weight", Parameter(entry.tensor())
    elif role in ("embed", "head") and kind == "weight":
        target, tensor = EMBEDDING if role == "embed" else HEAD, entry.tensor()
        full, total = shares.evidence.weight(target), shares.totals["vocab"]
        usual = [shares.planned["vocab"][rank], *candidates(total, len(tensor), *shares.seat(rank))]
        columns = (w[:, :_COLUMNS].T[..., None] for w in (tensor, full)) if tensor.dim() == 2 else ()
        yield target, _share(tensor, 0, (tensor.dim() == 2 and fit(*columns, usual, search=False)) or usual[0], 1)


def _share(tensor: torch.Tensor, dim: int, indices: Indices | None, size: int) -> Parameter:
    """A recorded tensor as the part of the checkpoint's that it should be; padding is dropped."""
    if indices is None:
        return Parameter(tensor)
    meant = [index * size + j if index != PADDING else PADDING for index in indices for j in range(size)]
    kept = [at for at, index in enumerate(meant) if index != PADDING]
    if dim < tensor.dim() and tensor.shape[dim] == len(meant) > len(kept):
        tensor = tensor.index_select(dim, torch.tensor(kept))
    return Parameter(tensor, dim, tuple(meant[at] for at in kept))


def wrong_parameters(recording: Recording, ckpt: Checkpoint) -> dict[str, str]:
    """``{"rank 1: tensor's name": what is wrong}``; empty where all weights are the checkpoint's bit for bit."""
    weights, wrong = {}, {}
    for rank, held in enumerate(recording.parameters):
        for name, parameter in (held or {}).items():
            # A norm's weight, say, may stand in float32 in a bfloat16 engine: as the file has it, or rounded before.
            for dtype in dict.fromkeys((recording.dtype, parameter.tensor.dtype)):
                tensors = weights.setdefault(dtype, Weights(ckpt, dtype, dtype))
                tied = name == HEAD and name not in tensors.parts
                right = tensors.raw(EMBEDDING if tied else name).to(parameter.tensor.dtype)
                if parameter.dim is not None:
                    right = right.index_select(parameter.dim, torch.tensor(list(parameter.indices), dtype=torch.long))
                if torch.equal(parameter.tensor, right):
                    break
            else:
                ours, what = parameter.tensor, f"shape {list(parameter.tensor.shape)}, not {list(right.shape)}"
                if ours.shape == right.shape:
                    what = f"{(ours != right).double().mean().item():.0%} of its numbers are not the checkpoint's"
                wrong[f"rank {rank}: {name}"] = what
    return wrong
