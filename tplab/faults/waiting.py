"""Faults of sums that are under way: read too early, written to too early, scattered after the wrong cut."""

import torch

from tplab.faults.fault import bug, two_ranks
from tplab.ranks import all_gather, all_reduce, rank, world_size
from tplab.shard import split_evenly


def read_before_wait(self, partial: torch.Tensor) -> torch.Tensor:
    work = all_reduce(partial, async_op=True)                  # returns at once: the sum comes later
    out = partial.clone()                                      # read before it is there
    work.wait()
    return out


def buffer_reused(self, partial: torch.Tensor) -> torch.Tensor:
    first, second = partial.chunk(2, dim=-1)                   # in two parts, through one buffer
    buffer = first.clone()
    work = all_reduce(buffer, async_op=True)                   # the first part is under way ...
    buffer[:, :second.shape[1]] = second                       # ... and its buffer takes the second
    work.wait()
    return torch.cat([buffer, all_reduce(second.clone())], dim=-1)


def wrong_rows_scattered(self, partial: torch.Tensor) -> torch.Tensor:
    sizes = [len(part) for part in split_evenly(len(partial), world_size())]
    own = torch.zeros_like(partial[:max(sizes)])
    own[:sizes[rank()]] = partial.split(sizes)[rank()]         # each rank cuts its own rows out ...
    all_reduce(own)                                            # ... so those of other tokens are added up
    return all_gather(own[:sizes[rank()]], 0, sizes)


_REDUCE, _NOTEBOOK = "tplab.shard.linear.RowParallelLinear.reduce", "13_do_not_wait"

FAULTS = (
    bug(_REDUCE, read_before_wait, "a sum is started, and read before it is there",
        "Right text as long as the other ranks are quick; under load, each rank goes on with half of every sum.",
        ("OpenNMT-py started the sum of its gradients with async_op=True and divided the buffer in the next line; "
         "a user asked about it, and waiting mended the training.",
         "https://github.com/OpenNMT/OpenNMT-py/issues/2295"),
        first_point="layers.0.o_proj", notebook=_NOTEBOOK, needs=two_ranks),
    bug(_REDUCE, buffer_reused, "a buffer takes the next part while its sum is under way",
        "Half of the numbers behind every sum belong to the other half: noise, also on one rank.",
        ("aiter's custom collectives returned while other ranks were still reading the input; who filled it anew at "
         "once had that in the sums.", "https://github.com/ROCm/aiter/pull/4082"),
        ("mori kept the outputs of two phases in one buffer; a quick rank overwrote what a slow one had not read.",
         "https://github.com/ROCm/mori/pull/93"),
        first_point="layers.0.o_proj", notebook=_NOTEBOOK),
    bug(_REDUCE, wrong_rows_scattered, "a scattered sum adds up the rows of different tokens",
        "All shapes fit, and each token goes on with other tokens' summands.",
        ("AReno's sequence parallelism cut another chunk out on each rank before the all-reduce, which adds up what "
         "stands at the same place; log-probabilities were off by 7.6 on average.",
         "https://github.com/inclusionAI/AReno/pull/510"),
        first_point="layers.0.o_proj", notebook=_NOTEBOOK, needs=two_ranks),
)
