"""What a case file is: an engine with something wrong in it, as its user reports it, and all that is known about it.

A case is one file of :mod:`course.cases`, data and patches; nothing else names it. The museum shows bugs by name;
a case shows a symptom and keeps the rest sealed, and ``course.lesson`` opens it.
"""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import resolve_name

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

    @property
    def right(self) -> Callable:
        """The repair: the engine's own code."""
        return engines_own(self.place)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The broken engine's patches for this bug."""
        return patches_at(self.place, self.wrong)

    @property
    def repair(self) -> tuple[Patch, ...]:
        """Patches that repair it."""
        return patches_at(self.place, self.right)


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """One sealed case; see :mod:`course.cases` for how to write one."""

    title: str  # as its user would name the issue
    report: str  # the issue in the user's words; {ranks} is how many ranks ran
    trials: Callable[[Callable[[int], list[int]]], Sequence[Trial]]  # take(count) → token ids; the first is reported
    bugs: tuple[Bug, ...]  # none: the engine is innocent
    what: str = ""  # the kind of mistake where there is no bug
    why: Mapping[str, str]  # explanation → why it is none; the empty string at the right one
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # place that looks guilty → why it is not
    hints: Sequence[str]  # each says more than the one before
    # Repairs that leave a bug in, or pay for it elsewhere: {place: function}, or what `examine` takes.
    false_repairs: Sequence
    production: str  # what a repair that hides the symptom does to its users
    budget: int = 8  # runs
    after: str = ""  # a notebook behind the cases' own that it is about
    below_bfloat16: bool = False  # its numbers differ by less than bfloat16 rounds
    needs: Callable[[object, int], str] = anywhere  # (config, ranks) → why it cannot show; as a Fault's
    user_output: Callable | None = None  # what its user ran, where that is no text: (ckpt, ranks) → words
    # Where a repair is no patch of the engine: (function, ckpt, ranks, seed) → what is true of a right one; raises
    # ValueError with the mistake of a wrong one. ``cure``: a right one.
    examine: Callable | None = None
    cure: Callable | None = None
    name: str = ""  # the file's

    @property
    def number(self) -> int:
        """Its place in the order of difficulty."""
        return int(self.name.rpartition("_")[2])

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All that is wrong: whatever has ``patches`` can be applied."""
        return tuple(patch for bug in self.bugs for patch in bug.patches)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is wrong, one kind for each bug."""
        return tuple(dict.fromkeys(bug.what for bug in self.bugs)) or (self.what,)

    def why_not(self, config, tensor_parallel_size: int) -> str:
        """Why it cannot show on a model with this many ranks; the empty string where it can."""
        return self.needs(config, tensor_parallel_size)

    def ranks_for(self, config, tensor_parallel_size: int) -> int | None:
        """This many ranks if it shows there, or else the fewest more; None if up to four never show it."""
        sizes = range(tensor_parallel_size, max(tensor_parallel_size, 4) + 1)
        return next((size for size in sizes if size <= config.num_heads and not self.why_not(config, size)), None)


@cache
def places() -> dict[str, tuple[str, ...]]:
    """``{"RowParallelLinear.reduce": (dotted names under which the engine calls it, …)}``, all functions of the core.

    A function that several files import has a dotted name in each of them.
    """
    modules = [import_module(f"tplab.{name}") for name in CORE]
    found: dict[str, tuple[str, ...]] = {}
    for module in modules:
        for name, one in vars(module).items():
            if getattr(one, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(one):
                found[name] = tuple(f"{other.__name__}.{name}" for other in (module, *modules)
                                    if vars(other).get(name) is one)
            elif inspect.isclass(one) and not issubclass(one, tuple):
                found |= {f"{name}.{method}": (f"{module.__name__}.{name}.{method}",) for method in _methods(one)}
    return {name: tuple(dict.fromkeys(targets)) for name, targets in found.items()}


def _methods(one: type) -> list[str]:
    """A class's own functions and those it has from another class of the engine."""
    return [name for name, what in inspect.getmembers(one, inspect.isfunction)
            if what.__module__.startswith("tplab.") and (not name.startswith("__") or name in ("__init__", "__call__"))]


def patches_at(place: str, function: Callable) -> tuple[Patch, ...]:
    """The patches that put ``function`` at a place of :func:`places`, wherever the engine calls it."""
    return tuple(Patch(target, function) for target in places()[place])


def engines_own(place: str) -> Callable:
    """The engine's own function at a place: the right code of a case, whatever it will be."""
    return original(places()[place][0])


def edited(place: str, edits: str, **names) -> Callable:
    """The engine's own function with its text changed: ``"old -> new ;; old -> new"``. So a change of the engine
    changes the case, or raises ValueError where it has no ``old`` any more. ``names``: what the new text needs and the
    engine's file does not have."""
    function = engines_own(place)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in (one.split(" -> ") for one in edits.split(" ;; ")):
        if source.count(old) != 1:
            raise ValueError(f"{place} of the engine has {source.count(old)} times {old!r}; the case changes one")
        source = source.replace(old, new)
    file, space = f"<case: {place}>", {**function.__globals__, **names}
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), space)
    return space[function.__name__]


def code_at(place: str) -> str:
    """The source of the code that is at a place now, below the lines that import what it names, for a cell."""
    function, lines = resolve_name(places()[place][0]), []
    code = inspect.cleandoc("\n" + inspect.getsource(function))
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    for name, one in inspect.unwrap(function).__globals__.items():
        if name in names and inspect.ismodule(one):
            lines.append(f"import {one.__name__}" + f" as {name}" * (one.__name__ != name))
        elif name in names and hasattr(one, "__name__"):
            lines.append(f"from {one.__module__} import {one.__name__}")
        elif name in names and isinstance(one, int | float | str):
            lines.append(f"{name} = {one!r}")
    return "\n".join([*sorted(lines), "", code])
