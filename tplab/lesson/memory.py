"""What a learner's function keeps between its calls: what it returns is made of its arguments and of nothing else."""

import copy
import io
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout

import torch

from tplab.pool.transfer import dumps, loads

KEEPS = "called again, it returns something else than a first call with the same arguments: what is kept between calls?"


class Memory:
    """What the latest ``calls`` of a function, outside of ranks, were given, and the function as it was before them."""

    def __init__(self, function: Callable):
        self.function, self.calls = function, deque(maxlen=8)
        try:
            self.new = dumps(function)
        except Exception:  # what cannot be copied is not looked at
            self.calls = deque(maxlen=0)

    def shows(self) -> bool:
        """Whether, behind one of these calls, one with other contents returns something else than a first call."""
        for args in self.calls:
            _result(self.function, args)
            later, first, again = (_result(function, map(_other, args)) for function in (
                self.function, loads(self.new), loads(self.new)))
            if first is not None and same(first, again, 1e-4) and not same(first, later, 1e-4):
                return True
        return False


def _result(function: Callable, args):
    """What it returns for copies; None if it fails, as it may with contents that are no example of a check's."""
    with redirect_stdout(io.StringIO()):
        try:
            return function(*copy.deepcopy([*args]))
        except (Exception, SystemExit):
            return None


def _other(arg):
    """Other contents in the same shape: numbers in another order, a mask the other way round."""
    if isinstance(arg, torch.Tensor):
        return ~arg if arg.dtype == torch.bool else arg.flip([*range(arg.dim())])
    return type(arg)(map(_other, arg[::-1])) if type(arg) in (list, tuple) else arg


def same(a, b, within: float = 0.0) -> bool:
    """Whether two arguments, or results, are alike; numbers of tensors to ``within`` of them."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike, (a, b) = a.shape == b.shape and a.dtype == b.dtype, (one.to_dense() for one in (a, b))
        return alike and (a.is_meta or torch.equal(a, b) or a.is_floating_point() and torch.allclose(
            a, b, within, within, equal_nan=True))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(*pair, within) for pair in zip(a, b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key], within) for key in a)
    if isinstance(a, int | float | str | bytes | bool | range | set | frozenset | type(None)):
        return a == b
    return True  # an object of the check's own: it watches itself
