"""Which of the reference's steps, by the names of its variables, a learner's lines have made."""

import copy
import sys
from collections.abc import Callable
from itertools import permutations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.judge.exercise import Example, Exercise
from course.judge.words import is_learners
from tplab.ranks import logical_ranks, rank

_MOST = 20_000, 500  # numbers of a tensor, and tensors, that are kept of one call


class Made(TorchDispatchMode):
    """What each torch call of a learner's code makes, with the line of the call: ``tensors``."""

    def __init__(self):
        super().__init__()
        self.tensors: list[tuple[int, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, frame = func(*args, **(kwargs or {})), sys._getframe(1)
        while frame is not None and not is_learners(frame.f_code.co_filename):
            frame = frame.f_back
        for leaf in tree_leaves(out) if frame is not None and len(self.tensors) < _MOST[1] else ():
            if isinstance(leaf, torch.Tensor) and 1 < leaf.numel() <= _MOST[0] and leaf.device.type == "cpu":
                self.tensors.append((frame.f_lineno, leaf.detach().clone()))
        return out


def is_like(tensor: torch.Tensor, step: torch.Tensor) -> bool:
    """Whether it is ``step``, in whatever layout."""
    if tensor.numel() != step.numel() or tensor.is_complex():
        return False
    tensor, step = tensor.double().squeeze(), step.double().flatten()
    most = 1e-4 * step[step.isfinite()].abs().amax().clamp(min=1.0).item() if step.isfinite().any() else 1e-4
    orders = permutations(range(tensor.dim())) if tensor.dim() < 6 else [range(tensor.dim())]
    return any(torch.allclose(tensor.permute(*order).flatten(), step, rtol=0, atol=most) for order in orders)


def right_steps(exercise: Exercise, answer: Callable, example: Example) -> str:
    """Which of the reference's variables a line makes on every rank: ``"Right in yours (the solution's names): scores
    (line 4); not found: weights"``; the empty string of a class."""
    if not hasattr(exercise.reference, "__code__"):
        return ""
    lines: list[dict[str, int]] = [{} for _ in range(example.ranks)]  # variable → the line that makes its last value
    half_made: set[str] = set()  # variables of which a line makes an earlier value, and none the last one

    def compare() -> None:
        arguments, steps, made = {}, {}, Made()

        def trace(frame, event, arg):
            if frame.f_code is not exercise.reference.__code__:
                return None
            arguments.update(frame.f_locals if event == "call" else {})
            for name, x in frame.f_locals.items() if event == "line" else ():  # later, a sum may be in its place
                is_step = isinstance(x, torch.Tensor) and x.is_floating_point() and x is not arguments.get(name)
                known = steps.get(name, [])  # the latest value of each shape
                if is_step and x.numel() > 1 and not any(map(x.equal, known)):
                    steps.pop(name, None)
                    steps[name] = [value for value in known if value.shape != x.shape] + [x.detach().clone()]
            return trace

        sys.settrace(trace)
        try:
            list(exercise.observe(exercise.reference, *copy.deepcopy(tuple(example))))
        finally:
            sys.settrace(None)
        with made:
            list(exercise.observe(answer, *copy.deepcopy(tuple(example))))
        for name, values in steps.items():
            *earlier, last = (next((line for line, tensor in made.tensors if is_like(tensor, step)), 0)
                              for step in values)
            lines[rank()][name] = last
            if any(earlier) and not last:
                half_made.add(name)

    with Made():
        torch.ones(2)  # the first use of such a mode imports much, which is not on the learner's time
    try:
        logical_ranks(example.ranks, compare, timeout=5)
    except Exception:  # of a learner's code that fails on other ranks
        return ""
    at = {name: min(mine.get(name, 0) for mine in lines) for name in lines[0]}
    right = ", ".join(f"{name} (line {lines[0][name]})" for name, line in at.items() if line)
    missing = next((name for name, line in at.items() if not line and name not in half_made), "")
    last, code = max(at.values(), default=0), getattr(answer, "__code__", None)
    follows = code and all(at.values()) and last < max(line for *_, line in code.co_lines() if line)
    rest = f"; not found: {missing}" if missing else f"; see what follows line {last}" if follows else ""
    return f"Right in yours (the solution's names): {right}{rest}" if right else ""
