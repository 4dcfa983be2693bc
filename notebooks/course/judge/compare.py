"""A learner's numbers beside the right ones: where they part, what explains them, and which lines are right."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, permutations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.judge.words import NotYet, is_learners
from tplab.checks import spans

LITTLE = "What is off by so little has lost digits: in which dtype is it computed, or kept?"
_MOST = 20_000, 500  # numbers of a tensor, and tensors, that are kept of one call
Lines = Sequence[tuple[int, torch.Tensor]]


class Made(TorchDispatchMode):
    """What each torch call of a learner's code makes, with the line of the call: ``found``."""

    def __enter__(self):
        self.found = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, frame = func(*args, **(kwargs or {})), sys._getframe(1)
        while frame is not None and not is_learners(frame.f_code.co_filename):
            frame = frame.f_back
        for one in tree_leaves(out) if frame is not None and len(self.found) < _MOST[1] else ():
            if isinstance(one, torch.Tensor) and 1 < one.numel() <= _MOST[0] and one.device.type == "cpu":
                self.found.append((frame.f_lineno, one.detach().clone()))
        return out


def agree(value, right, mistakes: Mapping[str, object], otherwise: str = "", within: float = 1e-4, *, dims: str = "",
          parts: Mapping[str, torch.Tensor] | None = None, steps: Mapping[str, object] | None = None,
          made: Lines = ()) -> None:
    """Raise `NotYet` unless ``value`` is ``right`` to within ``within`` of its largest number.

    ``mistakes``: ``{sentence: what comes of this mistake, or a tuple of several such}``; the first sentence whose
    numbers are the same is said. Else ``otherwise``, or where the two part; then what explains the value, if that
    gives just these numbers. ``dims`` names dimensions (``"token, head"``), ``parts`` are what a right value is the
    sum of, and ``steps`` what is computed on the way to it, which is looked up in what the learner's lines ``made``.
    """
    says = known(value, right, {"": right, **mistakes}, within)
    if says == "":
        return
    value, right = map(_tensor, (value, right))
    if says is not None or value.shape != right.shape:
        raise NotYet(says or otherwise)
    names, most = [name.strip() for name in dims.split(",") if name.strip()], _most(right, within)
    is_number, place = right.dtype != torch.bool, where(value, right, most, names)
    value, right = value.double(), right.double()
    gap = (value - right).abs().nan_to_num(torch.inf, torch.inf).max().item()
    near = min(most, gap / 50)  # what explains the value leaves next to nothing of the gap
    why = is_number and (related(value, right, near, names) or parts and made_of(value, right, near, names, parts))
    otherwise = "" if why == LITTLE else otherwise
    lines = [otherwise or place, why or (place if otherwise and names else ""),
             right_lines({**(steps or {}), "the result": right}, made, most) if steps else ""]
    raise NotYet("\n".join(filter(None, lines)))


def known(value, right, mistakes: Mapping[str, object], within: float) -> str | None:
    """The first sentence of ``mistakes``, as `agree` has them, whose numbers are those of ``value``."""
    value, most = _tensor(value).double(), _most(_tensor(right), within)
    return next((says for says, some in mistakes.items() for one in map(_tensor, some if isinstance(some, tuple) else (
        some,)) if one.shape == value.shape and torch.allclose(one.double(), value, rtol=0, atol=most, equal_nan=True)),
                None)


def _tensor(one) -> torch.Tensor:
    return one if isinstance(one, torch.Tensor) else torch.as_tensor(
        one, dtype=torch.float64 if isinstance(one, float) else None)


def _most(right: torch.Tensor, within: float) -> float:
    return within * max([1.0, *right[right.isfinite()].double().abs().flatten().tolist()])


def where(value, right, most: float, names: Sequence[str], true: str = "True") -> str:
    """For which tokens, heads … it is wrong, and the first wrong number (or what is ``true``) beside the right one."""
    wrong = ~torch.isclose(value.double(), right.double(), rtol=0, atol=most, equal_nan=True)
    if not wrong.any() or not value.dim():
        return ""
    at, parted = wrong.nonzero()[0].tolist(), []
    for dim, name in enumerate(names or ["number"] * (value.dim() == 1)):
        bad = wrong.movedim(dim, 0).reshape(value.shape[dim], -1).any(1).nonzero().flatten().tolist()
        if len(bad) < value.shape[dim]:
            many = name[:-1] + "ies" if name.endswith("ry") else name + "s"
            parted.append(f"{many if len(bad) > 1 else name} {', '.join(spans(bad)[:4])} of {value.shape[dim]}")
    first = ", ".join(f"{name} {i}" for name, i, size in zip(_all(names, value), at, value.shape) if size > 1)
    yours, must = (one[tuple(at)].item() for one in (value, right))
    digits = next((n for n in (4, 7) if f"{yours:.{n}g}" != f"{must:.{n}g}"), 17)
    yours, must = ((true if one else f"not {true}") if isinstance(must, bool) else f"{one:.{digits}g}"
                   for one in (yours, must))
    return (f"wrong for {' and '.join(parted) or 'every ' + _all(names, value)[0]}: the first, {first}, is {yours}, "
            f"and {must} is right")


def _all(names: Sequence[str], value: torch.Tensor) -> list[str]:
    return [*names, *["number"] * (value.dim() - len(names))]


def related(value: torch.Tensor, right: torch.Tensor, most: float, names: Sequence[str] = ()) -> str:
    """What turns all right numbers into these, if one thing does."""
    if value.shape != right.shape or not value.isfinite().all() or not value.any() or not right.any():
        return ""

    def same(other) -> bool:
        return torch.allclose(value, other, rtol=0, atol=most)

    many = value.numel() > 2
    factor, more = (value * right).sum() / right.pow(2).sum(), (value - right).mean()
    found = {
        "It is right but for its sign": same(-right), "It is right but for signs": same(right.abs().copysign(value)),
        f"Every number is {factor:.4g} times what it must be": many and same(factor * right),
        f"Every number is off by {more:+.4g}": many and same(right + more),
        **{says: True for dim, of in enumerate(_all(names, value)) if (says := _moved(value, right, most, dim, of))},
        LITTLE: (value - right).abs().max() < 5e-3 * right.abs().max(),
        "The numbers are right, and stand in another order": many and same(
            right.flatten().sort().values[value.flatten().argsort().argsort()].view(value.shape))}
    return next((says for says, is_so in found.items() if is_so), "")


def _moved(value: torch.Tensor, right: torch.Tensor, most: float, dim: int, name: str) -> str:
    """That its slices along ``dim`` are right ones of other places, if all of them are."""
    ours, theirs = (one.movedim(dim, 0).reshape(one.shape[dim], -1) for one in (value, right))
    if len(ours) < 2 or ours.shape[1] < 2 or len(ours) > 100:
        return ""
    like = (ours[:, None] - theirs).abs().amax(-1) <= most
    whose = [at if row[at] else int(row.int().argmax()) for at, row in enumerate(like)] if like.any(1).all() else []
    return "; ".join([f"{name} {at} has what belongs to {name} {of}" for at, of in enumerate(whose) if at != of][:3])


def made_of(value: torch.Tensor, right: torch.Tensor, most: float, names: Sequence[str], parts) -> str:
    """How often each of ``parts`` is in the rows of ``value``, if they are sums of these, and how often it must be.

    ``parts``: ``{name: tensor}`` of the shape of ``value``, or of one that can be expanded to it.
    """
    if not value.isfinite().all():
        return ""
    terms = torch.stack([one.double().expand_as(value) for one in parts.values()], -1)
    for own in range(value.dim()):  # so many leading dimensions have counts of their own
        a, lead = terms.flatten(own, -2), value.shape[:own]
        if a.shape[-2] <= a.shape[-1]:
            return ""  # as many unknowns as numbers fit anything
        rows = [one.reshape(*lead, -1, 1) for one in (value, right)]
        times = [torch.linalg.lstsq(a, row).solution for row in rows]
        if all(torch.allclose(a @ count, row, rtol=0, atol=most) for count, row in zip(times, rows)):
            yours, must = (count[..., 0] for count in times)
            at, *_ = [*((yours - must).abs().amax(-1) > 1e-3).nonzero().tolist(), [0] * own]
            label = ", ".join(f"{name} {i}" for name, i, size in zip(names, at, lead) if size > 1)
            counts = [(*(f"{0.0 if abs(c) < 1e-4 else c:.3g}" for c in pair), *name.rpartition(" ")) for name, *pair in
                      zip(parts, yours[tuple(at)].tolist(), must[tuple(at)].tolist())]
            said = [f"{_joined([''.join(name) for *_, name in alike])} {c} times (right: {r})"
                    for (c, r, _), alike in groupby(((c, r, kind, (kind, *rest)) for c, r, kind, *rest in counts),
                                                    lambda one: one[:3]) if c != r]
            said.sort(key=lambda one: "(right: 0)" not in one)  # what must not be in it comes first
            return f"In yours{label and ', at '}{label}, {', '.join(said[:4])}" if said else ""
    return ""


def _joined(names: Sequence[str]) -> str:
    """``"feature 3 to feature 5 count"`` of feature 3, feature 4 and feature 5."""
    return f"{names[0]} to {names[-1]} count" if len(names) > 2 else f"{' and '.join(names)} count" + "s" * (
        len(names) == 1)


def right_lines(steps: Mapping[str, object], made: Lines, most: float) -> str:
    """Which of the ``steps`` to ``"the result"`` the learner's lines have made; a step that can be made in several ways
    is a tuple."""
    several = {name: step if isinstance(step, tuple) else (step,) for name, step in steps.items()}
    lines = {name: next((line for line, one in made if any(is_like(one, each, most) for each in some)), 0)
             for name, some in several.items() if name == "the result" or some[0].numel() > 1}
    if lines.pop("the result"):
        line = next(line for line, one in made if is_like(one, steps["the result"], most))
        return f"Your line {line} makes the right result: what becomes of it?"
    found, missing = ([name for name, line in lines.items() if bool(line) == is_there] for is_there in (True, False))
    if not found:
        pieces = made and max(Counter(line for line, _ in made).values()) > 16  # a loop, which makes no whole one
        return f"None of your lines makes {missing[0]}" if missing and not pieces else ""
    behind = [name for name in missing if [*lines].index(name) > [*lines].index(found[-1])]
    return "Right in yours: " + ", ".join(f"{name} (line {lines[name]})" for name in found) + (
        f"; not found: {', '.join(dict.fromkeys([missing[0], *behind[:1]]))}" if missing else
        f". See what follows in line {max(lines.values())} or after it")


def is_like(one: torch.Tensor, step: torch.Tensor, most: float) -> bool:
    """Whether it is ``step``, in whatever layout."""
    if one.numel() != step.numel() or one.is_complex():
        return False
    one, step = one.double().squeeze(), step.double().flatten()
    orders = permutations(range(one.dim())) if one.dim() < 6 else [range(one.dim())]
    return any(torch.allclose(one.permute(*order).flatten(), step, rtol=0, atol=most) for order in orders)


def first_without(made: Mapping[int, Lines], own: Sequence[torch.Tensor]) -> int:
    """The first rank none of whose lines has made its ``own`` part; else rank 0."""
    return next((r for r, part in enumerate(own) if not any(is_like(one, part, 1e-3) for _, one in made.get(r, ()))), 0)
