"""What a case file is: an engine with something wrong in it, as its user reports it, and all that is known about it.

A case is one file of :mod:`course.cases`, data and patches; nothing else names it. The museum shows bugs by name;
a case shows a symptom and keeps the rest sealed, and ``course.lesson`` opens it.
"""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, update_wrapper
from importlib import import_module
from pkgutil import resolve_name
from types import FunctionType

from course.judge import exercise
from tplab.faults.fault import anywhere
from tplab.patch import Patch, original

NOWHERE = "nowhere"  # the place to blame when the engine is innocent
# What a learner can name and repair: the engine's core loop, in the order in which a step goes through it.
CORE = ("engine.core", "engine.scheduler", "engine.draft", "engine.step", "engine.runner", "engine.sampler",
        "cache.blocks", "cache.table", "cache.paged", "model.loader", "model.decoder", "model.norm", "model.rope",
        "model.attention", "model.mlp", "shard.parameter", "shard.linear", "shard.embedding")


@dataclass(frozen=True)
class Trial:
    """One run of the engine in which a case shows, or in which a repair is tested."""

    says: str  # the run in words: "a prompt of 33 tokens, read 16 at a time"
    prompts: Sequence[Sequence[int]]
    new_tokens: int = 0  # so many of each prompt's last tokens come one by one; 0: one forward pass over the prompts
    options: Mapping = field(default_factory=dict)  # of :func:`tplab.align.align_decode`


@dataclass(frozen=True)
class Bug:
    """One thing that is wrong in a case."""

    place: str  # the guilty function, as :func:`places` calls it
    wrong: Callable  # the broken code
    what: str  # the kind of mistake, among those of all cases
    fault: str  # what the diagnosis calls it


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """One sealed case; CONTRIBUTING says how to write one."""

    title: str  # as its user would name the issue
    report: str  # the issue in the user's words; {ranks} is how many ranks ran
    trials: Callable[[Callable[[int], list[int]]], Sequence[Trial]]  # take(count) → token ids; the first is reported
    bugs: tuple[Bug, ...]  # none: the engine is innocent
    what: str = ""  # the kind of mistake where there is no bug
    why: Mapping[str, str]  # explanation → why it is none; the empty string at the right one
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # place that looks guilty → why it is not
    not_what: Mapping[str, str] = field(default_factory=dict)  # kind of mistake that seems to fit → why it does not
    hints: Sequence[str]  # each says more than the one before
    false_repairs: Sequence[Mapping[str, Callable]]  # {place: function}; they leave a bug in, or pay for it elsewhere
    budget: int = 8  # runs
    collectives: int = 2  # in a layer, at most, of a repaired engine
    needs: Callable[[object, int], str] = anywhere  # (config, ranks) → why it cannot show; as a Fault's
    user_output: Callable | None = None  # what its user ran, where that is no text: (ckpt, ranks, prompts) → words
    # Where a repair is no patch of the engine: (function, ckpt, ranks, reported prompts, fresh ones) → what is true of
    # a right one; raises ValueError with the mistake of a wrong one. ``cure``: a right one.
    examine: Callable | None = None
    cure: Callable | None = None
    name: str = ""  # the file's

    @property
    def number(self) -> int:
        """Its place in the order of difficulty."""
        return int(self.name.rpartition("_")[2])

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        """All that is wrong: whatever has ``patches`` can be applied."""
        return patches_at({bug.place: _at_home(bug.place, bug.wrong) for bug in self.bugs})

    @property
    def repair(self) -> dict[str, Callable]:
        """A right repair, by where something is wrong: the engine's own code."""
        return {bug.place: engines_own(bug.place) for bug in self.bugs} or {NOWHERE: self.cure}

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is wrong, one kind for each bug."""
        return tuple(dict.fromkeys(bug.what for bug in self.bugs)) or (self.what,)

    def ranks_for(self, config, tensor_parallel_size: int) -> int | None:
        """This many ranks if it shows there, or else the fewest more; None if up to four never show it."""
        sizes = range(tensor_parallel_size, max(tensor_parallel_size, 4) + 1)
        return next((size for size in sizes if size <= config.num_heads and not self.needs(config, size)), None)


@cache
def places() -> dict[str, tuple[str, ...]]:
    """``{"RowParallelLinear.reduce": (dotted names under which the engine calls it, …)}``, all functions of the core.

    A function that several files import has a dotted name in each of them.
    """
    modules = [import_module(f"tplab.{name}") for name in CORE]
    by_place: dict[str, tuple[str, ...]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                by_place[name] = tuple(f"{other.__name__}.{name}" for other in dict.fromkeys((module, *modules))
                                       if vars(other).get(name) is value)
            elif inspect.isclass(value) and not issubclass(value, tuple):
                by_place |= {f"{name}.{method}": (f"{module.__name__}.{name}.{method}",) for method, function in
                             inspect.getmembers(value, inspect.isfunction) if function.__module__.startswith("tplab.")
                             and not function.__code__.co_filename.startswith("<")  # a dataclass's own has no source
                             and (not method.startswith("__") or method in ("__init__", "__call__"))}
    return by_place


def patches_at(functions: Mapping[str, Callable]) -> tuple[Patch, ...]:
    """The patches that put each function at its place of :func:`places`, wherever the engine calls it."""
    return tuple(Patch(target, function) for place, function in functions.items() for target in places()[place])


def engines_own(place: str) -> Callable:
    """The engine's own function at a place: the right code of a case, whatever it will be."""
    return original(places()[place][0])


def edited(place: str, edits: str, **names) -> Callable:
    """The engine's own function with its text changed, so that a change of the engine changes the case, too: see
    :func:`course.judge.exercise.edited`. ``names``: what the new text needs and the engine's file does not have."""
    return exercise.edited(engines_own(place), edits, **names)


def _at_home(place: str, wrong: Callable) -> Callable:
    """``wrong``, which gives the engine's own file and line as its place: op logs and errors name those of each
    caller, and a case's file there would say which function is the guilty one."""
    own = inspect.unwrap(engines_own(place)).__code__
    code = wrong.__code__.replace(co_filename=own.co_filename, co_firstlineno=own.co_firstlineno)
    function = FunctionType(code, wrong.__globals__, wrong.__name__, wrong.__defaults__, wrong.__closure__)
    function.__kwdefaults__ = wrong.__kwdefaults__
    return update_wrapper(function, wrong)


def code_at(place: str) -> str:
    """The source of the code that is at a place now, below the lines that import what it names, for a cell."""
    function, own, lines = inspect.unwrap(resolve_name(places()[place][0])), inspect.unwrap(engines_own(place)), []
    known, code = function.__globals__, _source(function)
    if function is not own and [*inspect.signature(function).parameters] == [*inspect.signature(own).parameters]:
        # With the engine's own annotations and docstring: without them it could be told from the others at sight.
        known, code = own.__globals__ | known, _cut(_source(own))[0] + _cut(code)[1]
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    for name, value in known.items():
        if name in names and inspect.ismodule(value):
            lines.append(f"import {value.__name__}" + f" as {name}" * (value.__name__ != name))
        elif name in names and hasattr(value, "__name__"):
            (target, *_) = places().get(name, [f"{value.__module__}.{name}"])  # not the file of a sealed function
            lines.append(f"from {target.rpartition('.')[0]} import {value.__name__}")
        elif name in names and isinstance(value, int | float | str):
            lines.append(f"{name} = {value!r}")
    return "\n".join([*sorted(lines), "", code.rstrip()])


def _source(function: Callable) -> str:
    return inspect.cleandoc("\n" + inspect.getsource(function)) + "\n"


def _cut(code: str) -> tuple[str, str]:
    """The source of a function: what stands above its first statement, and the rest."""
    function, lines = ast.parse(code).body[0], code.splitlines(keepends=True)
    above = function.body[ast.get_docstring(function) is not None].lineno - 1
    return "".join(lines[:above]), "".join(lines[above:])
