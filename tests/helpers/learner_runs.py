"""The learner's engine on ranks, from its text: on the processes of a pool, or on logical ranks."""

from types import SimpleNamespace

import torch

from tplab.pool import shared_pool
from tplab.ranks import all_gather, all_reduce, logical_ranks, rank, world_size

PROMPT, CHUNK, NEW_TOKENS = [(7 * i * i + 3) % 66 for i in range(14)], 8, 4


def _on_rank(source, dist, *args):
    names = {"__name__": "learner"}
    exec(compile(source, "learner.py", "exec"), names)
    names |= dist
    return names["generate"](*args)


def _logical_dist():
    """What the engine uses of torch.distributed, on logical ranks."""
    def gather(parts, tensor):
        for part, found in zip(parts, all_gather(tensor[None], dim=0)):
            part.copy_(found)
    return SimpleNamespace(get_rank=rank, get_world_size=world_size, all_gather=gather,
                           all_reduce=lambda tensor: tensor.copy_(all_reduce(tensor)))


def run(source: str, ckpt, to, dtype: torch.dtype, size: int = 2, prompt=PROMPT, new_tokens=NEW_TOKENS, chunk=CHUNK
        ) -> list[int]:
    """Record it: on real processes for two ranks, on logical ones otherwise; the ids of rank 0."""
    args = str(ckpt.folder), str(to), prompt, new_tokens, chunk, dtype
    if size == 2:
        return shared_pool(2).run(_on_rank, source, {}, *args)[0]
    return logical_ranks(size, _on_rank, source, {"dist": _logical_dist()}, *args)[0]
