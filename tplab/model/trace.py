"""Trace points: named places in the forward pass where a tensor can be recorded.

A point costs one attribute look-up while nothing is recorded. Its names are those of ``tplab.align.points``.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_active = threading.local()


@contextmanager
def recording() -> Iterator[dict[str, torch.Tensor]]:
    """Record every point that this thread passes; yields the dictionary that fills up with copies."""
    if getattr(_active, "points", None) is not None:
        raise RuntimeError("a trace is being recorded already")
    _active.points = {}
    try:
        yield _active.points
    finally:
        _active.points = None


def is_recording() -> bool:
    """Whether this thread's points are being recorded."""
    return getattr(_active, "points", None) is not None


def point(name: str, tensor: torch.Tensor) -> None:
    """Pass a trace point. The copy matters: some tensors are overwritten later (the all-reduce works in place)."""
    points = getattr(_active, "points", None)
    if points is not None:
        points[name] = tensor.detach().clone()
