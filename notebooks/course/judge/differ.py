"""How a value differs from the right one, in one sentence."""

import functools
from collections.abc import Sequence
from numbers import Integral

import torch

from course.judge.exercise import Example, Most
from tplab.checks import quoted

_PLAIN = bool | int | float | str | list | tuple | range | dict | set | bytes | None


def differs(value, right, within: float, dims: str = "", what: str = "it returns") -> str:
    """How a value differs from the right one; the empty string if it does not. ``within``: of the largest number.
    ``dims`` names the dimensions of a tensor; one that has fewer has the first names and the last."""
    if isinstance(right, Most):
        return (f"the rest is right; {what} {value.amount:,.0f}, and {right.amount:,.0f} are enough"
                if value.amount > right.spare * right.amount else "")
    if isinstance(right, torch.Tensor):
        return _tensors(value, right, within, dims, what)
    if isinstance(right, list | tuple | range) and isinstance(value, list | tuple | range):
        if len(value) == len(right):
            n = next((n for n, pair in enumerate(zip(value, right)) if differs(*pair, within)), None)
            if n is not None and max(len(quoted([*items])) for items in (value, right)) > 90:
                return f"{what}, at number {n}, {kind(value[n])}, and {kind(right[n])} is right"
            return "" if n is None else f"{what} {_short(value)}, and {_short(right)} is right"
        lacks = next((item for item in right if item not in value), None) if len(right) > len(value) else None
        if lacks is not None and len(quoted([*right])) > 90:
            return f"{what} {kind(value)}, and a list of {len(right)} is right, with {quoted(lacks)} too"
    elif isinstance(right, dict) and isinstance(value, dict) and value.keys() == right.keys():
        return next(filter(None, (differs(value[key], right[key], within, dims, f"{what}, for {key!r},")
                                  for key in right)), "")
    elif not isinstance(right, _PLAIN) or _equal(value, right, within):
        return ""  # an object of the exercise's own is watched by its observer
    if isinstance(right, bool) and isinstance(value, bool):
        return f"expected, but not so: {what}" if right else f"{what}; this must not happen"
    return f"{what} {kind(value, what)}, and {'None' if right is None else kind(right)} is right"


def _equal(value, right, within: float) -> bool:
    if isinstance(value, Integral) and type(right) is int and not isinstance(value, bool):
        return value == right
    if type(value) is not type(right):
        return False
    if isinstance(right, float):
        is_nan = value != value and right != right
        return value == right or is_nan or abs(value - right) <= within * max(1.0, abs(right))
    return value == right


def alike(value, other, within: float) -> bool:
    """Whether two wrong values are the same."""
    if isinstance(value, Most):
        return isinstance(other, Most) and abs(value.amount - other.amount) <= 0.01 * other.amount
    return not differs(value, other, within)


def _tensors(value, right: torch.Tensor, within: float, dims: str, what: str) -> str:
    names = [name.strip() for name in dims.split(",") if name.strip()]
    wanted = "must come back" if what.endswith("returns") else "is right"
    is_named = len(names) == right.dim() > 0
    shape = f"[{dims}] = {list(right.shape)}" if is_named else str(list(right.shape))
    must = shape if is_named else f"a tensor {shape}"
    if not isinstance(value, torch.Tensor):
        is_list = isinstance(value, list | tuple)
        return f"{what} {f'a {type(value).__name__}' if is_list else kind(value, what)}; a tensor {shape} {wanted}"
    if value.device.type != "cpu" or value.layout != torch.strided:
        return f"{what} a tensor on {value.device} with layout {value.layout}; an ordinary one {wanted}"
    if value.shape != right.shape:
        turned = sorted(value.shape) == sorted(right.shape) and len(set(right.shape)) == right.dim() == len(names)
        whose = f" (yours is [{', '.join(names[list(right.shape).index(n)] for n in value.shape)}])" if turned else ""
        return f"{what} a tensor {list(value.shape)}; {must} {wanted}{whose}"
    if value.dtype != right.dtype:
        return f"{what} {value.dtype}; {right.dtype} {wanted}"
    if right.dim() == 1 and right.numel() <= 20 and not right.is_floating_point():
        return differs(value.tolist(), right.tolist(), 0, what=what)
    sentence = where(value, right, within, names)
    return sentence and (sentence if what == "it returns" else f"{what.removesuffix(' is')}: {sentence}")


def of_dims(names: Sequence[str], count: int) -> list[str]:
    """Names of so many dimensions: [tokens, heads, head_dim] and [tokens, hidden] both end in numbers."""
    if len(names) > count > 1:
        return [*names[:count - 1], names[-1]]
    return [*names, *["number"] * (count - len(names))][:count]


def where(value: torch.Tensor, right: torch.Tensor, within: float, names: Sequence[str]) -> str:
    """For which tokens, heads … it is wrong, and the first wrong number beside the right one."""
    within = within and {torch.float64: 1e-5 * within}.get(right.dtype,
        within if right.dtype == torch.float32 else 0.03)
    value, right = (tensor.detach().double() for tensor in (value, right))
    finite = right[right.isfinite()].abs()
    most = within * max(1.0, finite.max().item() if finite.numel() else 1.0)
    bad = ~torch.isclose(value, right, rtol=0, atol=most, equal_nan=True)
    if not bad.any():
        return ""
    names, at = of_dims(names, right.dim()), bad.nonzero()[0].tolist()
    parted = [(name, bad.movedim(dim, 0).reshape(n, -1).any(1).nonzero().flatten().tolist(), n)
              for dim, (name, n) in enumerate(zip(names, right.shape))]
    only = " and ".join(f"{name} {_few(few)}" for name, few, n in parted if len(few) < n)
    place = ", ".join(f"{name} {i}" for name, i, n in zip(names, at, right.shape) if n > 1)
    if {*names} == {"number"} and len(names) > 1:
        place = str(at)
    yours, must = value[tuple(at)].item(), right[tuple(at)].item()
    digits = next((n for n in (4, 7) if f"{yours:.{n}g}" != f"{must:.{n}g}"), 17)

    def shown(number: float) -> str:
        is_short = abs(number) < 1e9 and 8 * number % 1 == 0
        return f"{number:.{12 if is_short else digits}g}"

    count = int(bad.sum())
    where_it_is = (place or "it") if count == 1 else f"the first, {place}," if place else "the first"
    return (f"{count} of {bad.numel()} numbers {'is' if count == 1 else 'are'} wrong"
            + f", all at {only}" * bool(only and count > 1)
            + f": {where_it_is} is {shown(yours)}, and {shown(must)} is right")


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + " …" * (len(numbers) > 4)


def relation(value, right, dims: str) -> str:
    """What all numbers have to do with the right ones, if it is simple: a factor, an order along a dimension."""
    both = value, right
    if not all(isinstance(x, torch.Tensor) and x.is_floating_point() and x.device.type == "cpu" for x in both):
        return ""
    if (value.shape, value.dtype) != (right.shape, right.dtype) or right.numel() < 3 or not all(
            x.isfinite().all() for x in both):
        return ""
    near = 1e-9 if right.dtype == torch.float64 else 1e-4
    value, right = value.detach().double(), right.detach().double()
    is_like = functools.partial(torch.allclose, rtol=0, atol=near * max(1.0, right.abs().max().item()))
    ratio = ((value * right).sum() / (right * right).sum().clamp(min=1e-30)).item()
    factor = round(ratio) if abs(ratio) > 1 else 1 / round(1 / ratio) if abs(ratio) > 0.1 else 0
    if factor not in (0, 1) and is_like(value, factor * right):
        return f". Each number is the right one times {factor:.3g}"
    names = dims.split(", ")
    for dim, name in enumerate(of_dims(names, right.dim())[:len(names)]):
        mine, its = value.movedim(dim, 0), right.movedim(dim, 0)
        order = [next((i for i, part in enumerate(its) if is_like(part, row)), None) for row in mine] * (len(its) < 20)
        if order and None not in order and len({*order}) > 1:
            return f". Along {name}, the right numbers stand in the order {_few(order)}"
    return ""


def kind(value, what: str = "it returns") -> str:
    """A value in a few words, without an address in memory: ``"a list of 3"``, ``"a tensor [2, 3]"``. ``what`` it is:
    what a function returns, or something else."""
    if value is None:
        return "nothing (is a return missing?)" if what.endswith(("returns", "says")) else "nothing"
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    text = quoted(float(f"{value:.7g}") if isinstance(value, float) else value)
    if " at 0x" in text or "\n" in text or len(text) > 80:
        size = f" of {len(value)}" if isinstance(value, list | tuple | dict | set) else ""
        return f"a {type(value).__name__}{size}"
    return text


def _short(value) -> str:
    text = quoted([*value])
    return text if len(text) <= 90 else f"{text[:80]} …]"


def call_in_words(takes: Sequence[str], example: Example) -> str:
    """What a call is given, in a few words: ``"q [5, 4, 6], scaling 0.3"``."""
    def shown(arg) -> str:
        if isinstance(arg, torch.Tensor):
            numbers = quoted(arg.tolist()) if arg.numel() <= 6 else f"of shape {list(arg.shape)}"
            return numbers + f" {str(arg.dtype)[6:]}" * (arg.dtype not in (torch.float32, torch.bool, torch.int64))
        return text if len(text := quoted(arg)) <= 40 and " at 0x" not in text else f"({type(arg).__name__})"

    return example.says or ", ".join(f"{name} {shown(arg)}" for name, arg in zip(takes, example))
