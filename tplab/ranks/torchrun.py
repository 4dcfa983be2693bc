"""Ranks that torchrun has started: the same functions by gloo, also across machines."""

import atexit
import importlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tplab.ranks import context
from tplab.ranks.errors import RankError, seconds
from tplab.ranks.group import Group

_LONGEST = 1e8  # seconds: three years; gloo counts nanoseconds in 64 bits


def join_torchrun(timeout: float = 60.0) -> tuple[int, int]:
    """Make this process the rank that torchrun's environment says it is; returns (rank, world size).

    A collective raises if it is not complete after `timeout` seconds.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RankError(f"join_torchrun: {', '.join(missing)} not set; start this with torchrun --nproc-per-node N …")
    if not dist.is_initialized():
        # Imported later (by transformers), it would keep the group alive: its functions have WORLD as a default.
        importlib.import_module("torch.distributed.nn.functional")
        dist.init_process_group("gloo", timeout=timedelta(seconds=min(seconds(timeout), _LONGEST)))
        atexit.register(_leave)
    group = GlooGroup(dist.get_rank(), dist.get_world_size())
    context.set_process_group(group)
    return group.rank, group.size


def _leave() -> None:
    """Without this, gloo's threads abort the process at its end: they free tensors after Python has shut down."""
    if dist.is_initialized():
        dist.destroy_process_group()


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


class GlooGroup(Group):
    """A rank of torch.distributed's default group."""

    def swap(self, piece, counts=None):
        counts = counts or [piece.numel()] * self.size
        # gloo gathers equal lengths only, does not wait where there is nothing to gather, and knows few dtypes.
        padded = torch.zeros(max(1, *counts), dtype=piece.dtype)
        padded[: piece.numel()].copy_(piece)
        parts = [torch.empty_like(padded) for _ in counts]
        try:
            dist.all_gather([part.view(torch.uint8) for part in parts], padded.view(torch.uint8))
        except RuntimeError as error:
            record = self.log.record(self.log.seq)
            at = f"line {record.line} of {os.path.basename(record.file)} (collective #{record.seq})"
            raise RankError(f"rank {self.rank} waited in {record} at {at} and lost the other ranks: {error}") from error
        return [part[:n] for part, n in zip(parts, counts)]
