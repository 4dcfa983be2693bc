"""Parts that exercises of several notebooks need: random numbers, counters, a model beside Hugging Face."""

from numbers import Real

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course.judge.differ import kind
from course.judge.words import NotYet

IDS = [3, 1, 4, 15, 9, 26, 5, 35, 8, 9, 7]  # eleven tokens for a small random model


def numbers(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Random numbers, the same ones every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dealt(total: int, size: int) -> list[range]:
    """Ranges for so many ranks, whose lengths no rule for dealing evenly gives."""
    return [range(total * r * r // size ** 2, total * (r + 1) ** 2 // size ** 2) for r in range(size)]


def unchanged(name: str, is_so: bool, returns: bool = True) -> None:
    """NotYet if an argument was changed that the engine still needs; ``returns``: whether something came back."""
    if not is_so:
        nothing = "" if returns else "returns nothing, and "
        raise NotYet(f"it {nothing}changes its argument {name}, which its caller still needs: work on a copy")


def pair(value, what: str) -> list:
    """``value``, a list or tuple of two, as a list; else NotYet. ``what``: what must come back."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise NotYet(f"it returns {kind(value)}; {what} must come back")
    return list(value)


def one_number(value, what: str = "a number"):
    """``value`` as a float where it is a number, or a tensor of one; else NotYet."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise NotYet(f"it returns {kind(value)}; {what} must come back")
    return float(value)


def whole_numbers(value, what: str) -> list[int]:
    """``value``, a list, tuple or range of ints, as a list; NotYet if it is none. ``what``: what they are."""
    if not isinstance(value, list | tuple | range) or any(type(number) is not int for number in value):
        raise NotYet(f"it returns {kind(value)}; a list of whole numbers must come back, {what}")
    return list(value)


class Multiplications(TorchDispatchMode):
    """Counts multiplications by matrices."""

    _INPUT = {"mm": 0, "bmm": 0, "mv": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, at = func(*args, **(kwargs or {})), self._INPUT.get(func.overloadpacket.__name__)
        if at is not None:
            self.count += result.numel() * args[at].shape[-1]
        return result
