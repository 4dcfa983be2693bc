"""Faults of sums that are not complete: read too early, overwritten too early, scattered after the wrong cut."""

import torch

from tplab.faults.fault import bug, two_ranks
from tplab.ranks import all_gather, all_reduce, rank, world_size
from tplab.shard import split_evenly


def read_before_wait(self, partial: torch.Tensor) -> torch.Tensor:
    work = all_reduce(partial, async_op=True)                  # returns at once: the sum comes later
    out = partial.clone()                                      # read before the sum is complete
    work.wait()
    return out


def buffer_reused(self, partial: torch.Tensor) -> torch.Tensor:
    first, second = partial.chunk(2, dim=-1)                   # two parts, added up one after the other
    buffer = first.clone()
    work = all_reduce(buffer, async_op=True)                   # the first part's sum is started ...
    buffer[:, :second.shape[1]] = second                       # ... and its buffer gets the second part
    work.wait()
    return torch.cat([buffer, all_reduce(second.clone())], dim=-1)


def wrong_rows_scattered(self, partial: torch.Tensor) -> torch.Tensor:
    sizes = [len(part) for part in split_evenly(len(partial), world_size())]
    own = torch.zeros_like(partial[:max(sizes)])
    own[:sizes[rank()]] = partial.split(sizes)[rank()]         # each rank takes its own rows first ...
    all_reduce(own)                                            # ... so rows of different tokens are added up
    return all_gather(own[:sizes[rank()]], 0, sizes)


_REDUCE, _NOTEBOOK = "tplab.shard.linear.RowParallelLinear.reduce", "13_do_not_wait"

FAULTS = (
    bug(_REDUCE, read_before_wait, "a sum is started and read before it is complete",
        "The text is right while the other ranks are quick; under load, each rank goes on with a part of every sum.",
        ("OpenNMT-py started the sum of its gradients with async_op=True and divided the buffer in the next line; a "
         "user asked about it, and a wait repaired the training.", "https://github.com/OpenNMT/OpenNMT-py/issues/2295"),
        first_point="layers.0.o_proj", notebook=_NOTEBOOK, needs=two_ranks),
    bug(_REDUCE, buffer_reused, "a buffer gets the next part before its sum is complete",
        "Half of the numbers after every sum are copies of the other half: noise, also on one rank.",
        ("aiter's custom collectives returned while other ranks were still reading the input; if it was filled again "
         "at once, the new numbers were in the sums.", "https://github.com/ROCm/aiter/pull/4082"),
        ("mori kept the outputs of two phases in one buffer; a quick rank overwrote what a slow one had not read yet.",
         "https://github.com/ROCm/mori/pull/93"),
        first_point="layers.0.o_proj", notebook=_NOTEBOOK),
    bug(_REDUCE, wrong_rows_scattered, "a scattered sum adds up the rows of different tokens",
        "All shapes fit, and each token gets other tokens' summands.",
        ("In AReno's sequence parallelism, each rank took another chunk before the all-reduce, which adds up numbers "
         "at the same place; log-probabilities differed by 7.6 on average.",
         "https://github.com/inclusionAI/AReno/pull/510"),
        first_point="layers.0.o_proj", notebook=_NOTEBOOK, needs=two_ranks),
)
