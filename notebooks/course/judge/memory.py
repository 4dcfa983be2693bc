"""What a learner's function keeps between its calls: what it returns is made of its arguments and of nothing else."""

import copy
import io
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

import torch

from tplab.pool.transfer import dumps, loads
from tplab.ranks import logical_ranks, rank, world_size
from tplab.ranks.context import inside_rank

KEEPS = "called again, it returns something else than a first call with the same arguments: what is kept between calls?"


class Memory:
    """What the latest calls of a function were given, also on logical ranks, and the function as it was before them."""

    def __init__(self, function: Callable):
        self.function, self.calls, self.runs = function, deque(maxlen=8), {}
        try:
            self.new = dumps(function)
        except Exception:  # what cannot be copied is not looked at
            self.new = None

    def note(self, args: Sequence) -> None:
        """That this call, of the latest run of so many ranks if on one, was given ``args``."""
        if inside_rank():
            self.runs.setdefault(world_size(), {})[rank()] = args
        else:
            self.calls.append({0: args})

    def shows(self) -> bool:
        """Whether, behind one of these calls, one with other contents returns something else than a first call."""
        runs = [each for size, each in self.runs.items() if len(each) == size > 1]
        for each in [*self.calls, *runs] if self.new is not None else ():
            other = {r: [_other(arg) if len(each) == 1 or isinstance(arg, torch.Tensor) else arg for arg in args]
                     for r, args in each.items()}  # on ranks, a list says what each of them holds
            if _result(self.function, each):
                later, first, again = (_result(function, other) for function in (
                    self.function, loads(self.new), loads(self.new)))
                if "" != first == again != later:
                    return True
        return False


def _result(function: Callable, given: dict[int, Sequence]) -> str:
    """What it returns for copies, by rank, in words; nothing if it fails, as it may with contents that no check has."""
    def call():
        return function(*copy.deepcopy([*given[rank() if len(given) > 1 else 0]]))

    with redirect_stdout(io.StringIO()):
        try:
            text = str(logical_ranks(len(given), call, timeout=5) if len(given) > 1 else call())
            return "" if " at 0x" in text else text
        except (Exception, SystemExit):
            return ""


def _other(arg):
    """Other contents in the same shape: numbers in another order, a mask the other way round."""
    if isinstance(arg, torch.Tensor):
        return ~arg if arg.dtype == torch.bool else arg.flip([*range(arg.dim())])
    return type(arg)(map(_other, arg[::-1])) if type(arg) in (list, tuple) else arg
