"""What the recorded tensors' names and sizes refuse, and the ranks that share their layers."""

import math
from collections import Counter

import torch

from tplab.align.check.names import INNER, pattern_of, role_in, role_of, split_name
from tplab.align.check.notes import listed
from tplab.align.check.rows import call_inputs
from tplab.align.recording import Contradiction, PlacementError


def check_one_model(entries) -> None:
    """Refuse several models in one recording, such as a draft and its target."""
    names = dict.fromkeys(entry.name for entry in entries if entry.kind != "tensor")
    stacks = list(dict.fromkeys(pattern_of(name).partition("{i}")[0].rstrip(".") for name in names
                                if split_name(name)[0] is not None and role_of(*split_name(name)) in INNER))
    if len(stacks) > 1:
        parts = [stack.split(".") for stack in stacks]
        depth = next((i for i, level in enumerate(zip(*parts)) if len(set(level)) > 1), 0)
        raise PlacementError(f"layers of {len(stacks)} models were recorded, in {', '.join(stacks)}; leave out all "
                             f"but the checkpoint's with names=, such as --name '{'.'.join(parts[-1][:depth + 1])}*='")


def check_sizes(entries, config) -> None:
    """Refuse layers and widths that the checkpoint does not have."""
    for entry in entries:
        layer, rest = split_name(entry.name)
        if (layer or 0) >= config.num_layers:
            raise PlacementError(f"the recording has a layer {layer}, but the checkpoint's layers are 0 to "
                                 f"{config.num_layers - 1}: it was recorded with another checkpoint")
        if role_in(config, layer, rest) in ("input_norm", "post_norm", "norm", "embed") and entry.kind == "out" and (
                entry.path in ("", "0") and entry.shape[-1:] not in ((), (config.hidden_size,))):
            raise PlacementError(f"{entry.name} gives {entry.shape[-1]} columns, but the checkpoint's hidden size is "
                                 f"{config.hidden_size}: it was recorded with another checkpoint")


def check_rows(sources) -> None:
    """Each call has as many rows as ``rec.inputs`` gave tokens; more of them are padding, if the model got them."""
    for call in sources.calls:
        entries = [entry for calls in sources.recorded.values() for entry in calls[call.index].entries]
        rows = Counter(math.prod(entry.shape[:-1]) for entry in entries if entry.dtype.is_floating_point
                       and entry.shape[-1:] == (sources.config.hidden_size,))
        if not rows or rows.keys() & {call.size, len(call.ends)}:
            continue
        usual, ids = rows.most_common(1)[0][0], sources.recorded[sources.ranks[0]][call.index].input_ids
        id_tensors = (entry.tensor().flatten() for entry in entries if math.prod(entry.shape) == usual > call.size
                 and not (entry.dtype.is_floating_point or entry.dtype.is_complex))
        if ids is None or usual % call.tokens or not any(
                torch.equal(tensor[:call.size].long(), ids.flatten()) for tensor in id_tensors):
            raise PlacementError(f"call {call.index} has {call.size} token ids, but its tensors have {usual} rows; "
                                 "give rec.inputs(input_ids, positions) the ids of the call that follows")
        call.pad(usual)


def check_parallel(sources, whole: bool) -> None:
    """Refuse data and context parallelism: ranks that hold ``whole`` layers, and have other tokens from the first call
    on."""
    ids = {rank: call_inputs(calls[sources.used[0]])[0] for rank, calls in sources.recorded.items() if sources.used}
    tokens = {rank: sorted(x.flatten().tolist()) for rank, x in ids.items() if x is not None}
    other = next((rank for rank in tokens if tokens[rank] != tokens[min(tokens)]), None)
    if whole and other is not None:
        raise PlacementError(f"data or context parallelism: rank {other} holds whole layers and has other tokens than "
                             f"rank {min(tokens)} from the first call on; check compares ranks with the same tokens: "
                             "record one rank alone, with rank=0 and world_size=1, on a whole text")


def find_stages(sources) -> list[list[int]]:
    """The ranks of each pipeline stage; all ranks where there is one stage."""
    held = {rank: sources.layers_of(rank) for rank in sources.ranks}
    stages: list[list[int]] = []
    for rank in sorted(held, key=lambda rank: (-len(held[rank]), rank)):  # a rank that stopped early has fewer
        fitting = next((stage for stage in stages if held[rank] <= held[stage[0]]), None)
        fitting.append(rank) if fitting and (held[rank] or len(stages) == 1) else stages.append([rank])
    if len(stages) < 2:
        return [list(range(sources.world_size))]
    runs = Counter(layer for stage in stages for layer in held[stage[0]])
    if twice := sorted(layer for layer, times in runs.items() if times > 1):
        sources.contradictions.append(Contradiction(
            f"{listed('layer', twice)} of the model run in more than one stage of the pipeline", "layer_repeated"))
    return sorted(map(sorted, stages)) + [[rank] for rank in range(sources.world_size) if rank not in held]
