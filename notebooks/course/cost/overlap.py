"""Notebook 13: a race that is decided beforehand; faults in layers of their own; a layer by rows."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from tplab.faults import fault
from tplab.patch import Patch, original
from tplab.ranks import rank, state, world_size
from tplab.shard import split_evenly

_REDUCE = "tplab.shard.linear.RowParallelLinear.reduce"
# In a layer, nothing is summed up, and no point is passed: its rows are not those of Hugging Face.
SUMMANDS = [Patch(_REDUCE, lambda self, partial: partial),
            *(Patch(f"tplab.model.{name}.point", lambda name, tensor: tensor) for name in ("attention", "mlp"))]


def sizes_here(tokens: int) -> list[int]:
    """How many of so many tokens each rank keeps."""
    return [len(part) for part in split_evenly(tokens, world_size())]


def scattered(answer: Callable, layer, own, sizes, cos, sin, context) -> torch.Tensor:
    """A layer of the engine's by a function that takes what the exercise ``my_sequence_parallel_layer`` takes, with
    :data:`SUMMANDS` in force."""
    return answer(own, sizes, layer.input_layernorm, lambda x: layer.self_attn(x, cos, sin, context),
                  layer.post_attention_layernorm, layer.mlp)


def decided(reduce: Callable, others_late: bool) -> Patch:
    """``reduce`` in the engine's place, with the race in it decided beforehand.

    A sum is complete as soon as it is started; or, with ``others_late``, the other ranks enter it only after rank 0 has
    reached its wait for it.
    """
    def raced(self, partial):
        start, go = dist.all_reduce, torch.zeros(1)

        def let_others_enter():
            for other in range(1, world_size() if rank() == 0 and others_late else 1):
                dist.send(go, other)

        class Late:
            def __init__(self, work):
                self.wait = lambda: (let_others_enter(), work.wait())

        def all_reduce(t, async_op=False):
            if not async_op:
                let_others_enter()
            work = start(t, async_op=True)
            if async_op and others_late and rank() == 0:
                return Late(work)
            work.wait()
            return work

        if others_late and rank():
            dist.recv(go, 0)
        dist.all_reduce = all_reduce
        try:
            return reduce(self, partial)
        finally:
            dist.all_reduce = start

    return Patch(_REDUCE, raced)


def in_layers(names: Mapping[int, str], num_layers: int) -> Patch:
    """Each fault, by its layer, in that layer's sums alone."""
    def reduce(self, partial):
        call = state["calls"] = state.get("calls", -1) + 1
        name = names.get(call // 2 % num_layers)
        return (fault(name).patches[0].replacement if name else original(_REDUCE))(self, partial)

    return Patch(_REDUCE, reduce)
