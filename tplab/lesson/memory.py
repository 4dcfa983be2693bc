"""What a learner's function keeps between its calls: what it returns is made of its arguments and of nothing else."""

import copy
import io
from collections import deque
from collections.abc import Callable
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
            if "" != first == again != later:
                return True
        return False


def _result(function: Callable, args) -> str:
    """What it returns for copies, in words; nothing if it fails, as it may with contents that no check has."""
    with redirect_stdout(io.StringIO()):
        try:
            text = str(function(*copy.deepcopy([*args])))
            return "" if " at 0x" in text else text
        except (Exception, SystemExit):
            return ""


def _other(arg):
    """Other contents in the same shape: numbers in another order, a mask the other way round."""
    if isinstance(arg, torch.Tensor):
        return ~arg if arg.dtype == torch.bool else arg.flip([*range(arg.dim())])
    return type(arg)(map(_other, arg[::-1])) if type(arg) in (list, tuple) else arg
