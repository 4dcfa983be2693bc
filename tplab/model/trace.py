"""Trace points: named places in the forward pass where a tensor can be recorded.

A point costs one attribute look-up while nothing is recorded. Its names are those of ``tplab.align.points``.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_active = threading.local()


class _Passed(BaseException):
    """The last point of interest was passed."""


@contextmanager
def recording(given: dict[str, torch.Tensor] | None = None, until: str | None = None
              ) -> Iterator[dict[str, torch.Tensor]]:
    """Record every point that this thread passes; yields the dictionary that fills up with copies.

    For a replay:
        given: tensors with which the pass goes on in the place of those that it computed.
        until: the point at which the pass ends; it alone is recorded.
    """
    if getattr(_active, "points", None) is not None:
        raise RuntimeError("a trace is being recorded already")
    _active.points, _active.given, _active.until = {}, {} if given is None else given, until
    try:
        yield _active.points
    except _Passed:
        pass
    finally:
        _active.points = None


def is_recording() -> bool:
    """Whether this thread's points are being recorded."""
    return getattr(_active, "points", None) is not None


def point(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Pass a trace point; returns the tensor to go on with: the same one, or in a replay the one that is given. The
    copy matters: some tensors are overwritten later (the all-reduce works in place)."""
    points = getattr(_active, "points", None)
    if points is None:
        return tensor
    if _active.until in (None, name):
        points[name] = tensor.detach().clone()
    if _active.until == name:
        raise _Passed
    given = _active.given.get(name)
    return tensor if given is None or given.shape != tensor.shape else given.clone()
