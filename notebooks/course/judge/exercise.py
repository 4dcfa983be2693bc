"""An exercise as data: a reference, examples, and known mistakes, each a sentence and an edit of the reference."""

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from textwrap import dedent

from course.judge.setting import Setting
from tplab.patch import Patch

_number = count()
AGREED = "on {ranks}, every trace point agrees with Hugging Face"


@dataclass(frozen=True)
class Most:
    """An amount that must not be larger than the reference's by more than ``spare``: bytes read, numbers multiplied."""

    amount: float
    spare: float = 1.3


class Example(tuple):
    """The arguments of one call; ``ranks``: on how many logical ranks; ``says``: what is said of it instead of them."""

    def __new__(cls, *args, ranks: int = 1, says: str = ""):
        example = super().__new__(cls, args)
        example.ranks, example.says = ranks, says
        return example


def called(answer: Callable, *args) -> Iterator[tuple]:
    """What is seen of an answer: ``(what, value)``, or ``(what, value, right)`` where the right one is not what the
    reference shows. Behind a wrong one of these, nothing more is asked."""
    yield "it returns", answer(*args)


def engine(setting: Setting, answer: Callable) -> str | None:
    """An answer that was right on the examples, in the engine: raises NotYet, or returns a remark."""
    setting.align()


@dataclass(frozen=True, eq=False)
class Exercise:
    """One exercise. The reference is the notebook's folded solution, word for word."""

    notebook: str
    reference: Callable
    examples: Callable[[], Sequence[Example]] = tuple  # the smallest first
    mistakes: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)  # {sentence: edits}
    agreed: str = AGREED  # what is true of an answer that passes
    observe: Callable = called
    patches: Callable = lambda answer: []  # those that put an answer into the engine
    engine: Callable = engine
    more: Callable = lambda setting: ()  # examples made of the notebook's model
    dims: str = ""  # names of the dimensions of what is returned
    within: float = 1e-4  # of its largest number
    writes: str = ""  # the argument that it may write into
    place: str = ""  # what it does in the engine, if it stands there in the learner's own
    counted: bool = True  # whether an answer takes part in as many collectives as the reference
    alone: str = ""  # the remark where there is one rank

    @property
    def name(self) -> str:
        return self.reference.__name__

    @property
    def takes(self) -> list[str]:
        return [*inspect.signature(self.reference).parameters]

    @property
    def argument_names(self) -> list[str]:
        """The names of what an example holds: as the observer calls them, or as the reference does."""
        names = [*inspect.signature(self.observe).parameters][1:]
        return self.takes if names[:1] == ["args"] else names

    def variants(self, sentence: str) -> list[Callable]:
        """The wrong answers that a sentence is about."""
        edits = self.mistakes[sentence]
        return [edited(self.reference, edit) for edit in (edits if isinstance(edits, tuple) else (edits,))]


def edited(reference: Callable, edits: str, **names) -> Callable:
    """A function or class with its source changed: ``"old -> new ;; old -> new"``. Raises ValueError where the source
    has no ``old``. ``names``: what the new source needs and the reference's module does not have."""
    source = dedent(inspect.getsource(reference))
    for old, new in (edit.split(" -> ") for edit in edits.split(" ;; ")):
        if old not in source:
            raise ValueError(f"{reference.__qualname__} has no {old!r} to change")
        source = source.replace(old, new)
    space = {**vars(sys.modules[reference.__module__]), **names}
    run_lines(source, f"<edited {next(_number)}>", space)
    return space[reference.__name__]


def run_lines(source: str, file: str, space: dict, tree: ast.Module | None = None) -> None:
    """Run ``source``, or what ``tree`` has of it, as the contents of ``file``, whose lines can be shown."""
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(tree or source, file, "exec"), space)


def at(*targets: str) -> Callable[[Callable], list[Patch]]:
    """The patches of an answer that is called just as the engine's own function is."""
    return lambda answer: [Patch(target, answer) for target in targets]
