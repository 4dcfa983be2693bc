"""Calls of `torch.distributed` itself, entered in the op log of the rank that makes them.

Gloo does not compare what the ranks ask of it: where they differ, it hangs. So before the call all ranks compare their
records, as in the lab's own collectives. An asynchronous call does not wait for that; the next collective compares its
record too. Left out are point-to-point operations and groups of some of the ranks: the others have no such record.
"""

import inspect
import sys
import threading
from contextlib import contextmanager
from functools import wraps

import torch
import torch.distributed as dist

from tplab.ranks.group import NOTHING, Group
from tplab.ranks.oplog import DTYPE_CODES, MAX_DIMS, OPS

# By function: the parameter whose shape and dtype must be the same on all ranks. Functions for objects, and those under
# deprecated names, call these.
_TENSORS = {"all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor",
            "all_gather_single": "input_tensor", "gather": "tensor", "scatter": "tensor", "reduce_scatter": "output",
            "reduce_scatter_single": "output", "all_to_all": "input_tensor_list", "all_to_all_single": "input",
            "barrier": ""}
_ROOTS = ("src", "group_src", "dst", "group_dst")
_MODULES = (dist, dist.distributed_c10d)  # both have the functions, and the second calls them


@contextmanager
def logged(group: Group):
    """In the ``with`` block, calls of `torch.distributed` stand in the op log of ``group``, this process's."""
    originals = {name: getattr(dist, name) for name in _TENSORS}
    _put({name: _with_record(name, fn, group) for name, fn in originals.items()})
    try:
        yield
    finally:
        _put(originals)


def _put(functions: dict) -> None:
    for module in _MODULES:
        for name, function in functions.items():
            setattr(module, name, function)


def _with_record(name: str, fn, group: Group):
    defaults = {name: parameter.default for name, parameter in inspect.signature(fn).parameters.items()}
    op = OPS.index(f"dist.{name}")

    @wraps(fn)
    def call(*args, **kwargs):
        arguments = {**defaults, **dict(zip(defaults, args)), **kwargs}
        record = _record(name, arguments, group)
        if record is None:
            return fn(*args, **kwargs)
        group.log.enter(op, *record, sys._getframe(1))
        if arguments["async_op"]:
            group.log.leave()
            return fn(*args, **kwargs)
        group.swap(NOTHING)
        try:
            return fn(*args, **kwargs)
        finally:
            group.log.leave()

    return call


def _record(name: str, arguments: dict, group: Group):
    """Shape, dtype and root of a call, as the log holds them; None where not all ranks make it, or torch refuses it."""
    if threading.get_ident() != group.thread:
        return None
    if not dist.is_initialized() or dist.get_world_size(arguments["group"]) != group.size:
        return None
    if name == "barrier":
        return (), 0, 0
    t = arguments[_TENSORS[name]]
    root = next((arguments[root] for root in _ROOTS if arguments.get(root) is not None), 0)
    if name == "all_to_all" and t:
        t = t[0]  # gloo requires that all have one size
    if not isinstance(t, torch.Tensor) or t.dtype not in DTYPE_CODES or t.ndim > MAX_DIMS or not isinstance(root, int):
        return None
    uneven = arguments.get("input_split_sizes") or arguments.get("output_split_sizes")
    return (-1, *t.shape[1:]) if uneven else t.shape, DTYPE_CODES[t.dtype], root
