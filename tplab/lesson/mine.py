"""A learner's function as a check sees it: called with copies, its mistakes said in at most three lines."""

import copy
import functools
import inspect
import linecache
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from tplab.checks import shown
from tplab.ranks import OpRecord, logical_ranks, op_log
from tplab.ranks.context import inside_rank
from tplab.ranks.errors import Cause, CollectiveMismatch, Frame, RankError, describe, learner_stack, place
from tplab.ranks.oplog import is_machinery

_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
LIMIT = 5  # seconds that a call of a learner's code may take
_CALLED = "it was called with "
_LONGEST = 240  # characters of one line of a verdict
CELL = re.compile(r"cell In\[\d+\], ")  # JupyterLab counts cells and nbval does not: stored text cannot have them


class NotYet(Exception):
    """What is wrong with an answer, in the learner's terms: at most three lines."""


class Mine:
    """The learner's function (or class), ``takes`` the names of what it is called with: ``"scores, mask"``.

    Calling it gives what it returns. It gets copies of its arguments; raises :class:`NotYet` if it raises, cannot be
    called so, or writes into an argument that is not among ``writes``. ``given`` are the copies that it got last.
    """

    def __init__(self, function: Callable, takes: str, writes: str = ""):
        self.function, self.takes = kept(function, takes), [name.strip() for name in takes.split(",")]
        self.writes = [name.strip() for name in writes.split(",") if name]
        if not callable(function):
            raise NotYet(f"it is {kind(function)}; define a function that takes ({takes})")
        try:
            inspect.signature(function).bind(*self.takes)
        except TypeError:
            raise NotYet(f"it must take ({takes}); yours takes {inspect.signature(function)}") from None
        except ValueError:
            pass  # a builtin without a signature: the call will tell

    def __call__(self, *args):
        self.given = given = [copy.deepcopy(arg) for arg in args]
        result = guarded(self.function, *given)
        for name, arg, after in zip(self.takes, args, given):
            if name not in self.writes and not _same(arg, after):
                raise NotYet(f"it changes its argument {name}, which its caller still needs: work on a copy")
        return result

    def tensor(self, *args, dims: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """What it returns for ``args``, refused unless it is a tensor of that shape; ``dims`` names its dimensions."""
        return tensor(self(*args), dims, shape, dtype)


def on_ranks(ranks, function: Callable, *args, waits: str = "", timeout: float | None = None
             ) -> list[tuple[object, list[OpRecord]]]:
    """What ``function(*args)`` returns on each rank, and the collectives that it took part in there.

    ``ranks``: how many logical ones (threads), or a pool. ``waits`` is asked where ranks wait for one that does not
    come. Raises :class:`NotYet` if a rank fails, or waits for ever.
    """
    try:
        if isinstance(ranks, int):
            return logical_ranks(ranks, with_collectives, function, *args, timeout=LIMIT)
        return ranks.run(with_collectives, function, *args, timeout=timeout)
    except RankError as error:
        kind = error.first.kind if error.first is not None else ""
        asks = f"\n{waits}" if waits and kind == "waiting" else ""
        if kind == "running":
            asks = "\nNothing there lets another rank come: ranks meet in collectives, not in a loop or a sleep"
        if isinstance(error, CollectiveMismatch):
            asks = "\nAll ranks must make the same call, with tensors of the same shape and dtype"
        raise NotYet(in_words(error) + asks) from error


def with_collectives(function: Callable, *args) -> tuple[object, list[OpRecord]]:
    """On a rank: what ``function(*args)`` returns, and the collectives that it took part in."""
    before = max((record.seq for record in op_log()), default=0)
    return function(*args), [record for record in op_log() if record.seq > before]


def count_ops(ran: Sequence[tuple[object, list[OpRecord]]], wanted: dict[str, int]) -> None:
    """:class:`NotYet` unless every rank of :func:`on_ranks` took part in just these collectives: ``{"all_reduce": 1}``.
    """
    for r, (_, log) in enumerate(ran):
        if sorted(record.op for record in log) != sorted(op for op, count in wanted.items() for _ in range(count)):
            said = ", ".join(f"{count} {op}{'s' * (count > 1)}" for op, count in wanted.items()) or "no collective"
            raise NotYet(f"rank {r} of {len(ran)} calls {', '.join(record.op for record in log) or 'no collective'}; "
                         f"{said} must be enough")


def ranks_in_words(ranks: Sequence[int], size: int) -> str:
    """``"rank 1"``, ``"ranks 1 and 2"``, ``"every rank"``."""
    if len(ranks) == size > 1:
        return "every rank"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def guarded(function: Callable, *args, **kwargs):
    """Call the learner's code; an exception becomes :class:`NotYet` with the learner's own line.

    So does what a call of an ``async def`` gives, or of a function with a ``yield``: none of its lines has run.
    """
    try:
        with as_it_was():
            found = function(*args, **kwargs)
        if inspect.iscoroutine(found) or inspect.isgenerator(found):
            found.close()  # or Python warns that nobody has waited for it
            if inspect.isgenerator(found) and found.gi_code.co_name == "<genexpr>":
                raise NotYet("a generator expression gives its items one by one, once: write [… for …] where (… for …) "
                             "stands")
            how = "async def" if inspect.iscoroutine(found) else "yield"
            raise NotYet(f"with {how}, a call gives a {type(found).__name__} and runs none of your lines: use def, and "
                         "return")
        return found
    except NotYet:
        raise
    except (Exception, SystemExit) as error:
        if inside_rank():
            raise  # the caller of the ranks has the source of the cell, and knows who else says the same
        raise NotYet(in_words(error)) from error


@contextmanager
def as_it_was() -> Iterator[None]:
    """What a learner's code has set for all of torch is put back: the default dtype, the number of threads."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def kept(function: Callable, takes: str = "") -> Callable:
    """The function, and behind each of its calls everything as it was: in the engine and on the ranks as well.

    An exception says what the call was given: most are about shapes.
    """
    if not inspect.isroutine(function):
        return function

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            with as_it_was():
                return function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            if not isinstance(error, RecursionError):
                given = ", ".join(f"{name.strip()} {_given(arg)}" for name, arg in zip(takes.split(","), args))
                error.add_note(_CALLED + given)
            raise

    return call


def _given(arg) -> str:
    if isinstance(shape := getattr(arg, "shape", None), tuple):
        return str(list(shape))
    text = f"({', '.join(map(_given, arg))})" if isinstance(arg, tuple) or (
        isinstance(arg, list) and arg and hasattr(arg[0], "shape")) else shown(arg)
    return text if len(text) <= 40 and " at 0x" not in text else f"({type(arg).__name__})"


class Object:
    """An object of the learner's class: its methods are called with copies, as :class:`Mine` calls a function."""

    def __init__(self, made, name: str):
        self.made, self.name = made, name

    def __getattr__(self, name: str):
        try:
            found = getattr(self.made, name)
        except AttributeError:
            raise NotYet(f"{self.name} has no {name}") from None
        except Exception as error:
            raise NotYet(in_words(error)) from error
        if not inspect.isroutine(found):
            return found
        return functools.partial(guarded, kept(found, ", ".join(inspect.signature(found).parameters)))


def first_cause(error: BaseException) -> BaseException:
    """What an engine's error began with: what the ranks said, or else what was raised first."""
    while not isinstance(error, RankError) and (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def in_words(error: BaseException) -> str:
    """An exception of the learner's code in at most three lines: what, and the learner's own line.

    Of several ranks that say the same it is said once.
    """
    if isinstance(error, NotYet):
        return str(error)
    if isinstance(error, RankError) and error.first is not None:
        return _of_ranks(error)
    return _lines(describe(error), [frame for frame in learner_stack(error) if is_learners(frame.file)])


def _of_ranks(error: RankError) -> str:
    first: Cause = error.first
    said = first.text.partition(f"\n{_CALLED}")[0]
    alike = [cause.rank for cause in error.causes.values()
             if cause.kind == first.kind and cause.text.partition(f"\n{_CALLED}")[0] == said]
    who = "on every rank" if len(alike) == len(error.causes) > 1 else f"on rank {', '.join(map(str, sorted(alike)))}"
    frames = [frame for frame in first.frames if is_learners(frame.file)]
    if first.kind == "raised":
        text = first.text.removeprefix("raised ")
        said = text.removeprefix(f"{NotYet.__name__}: ")
        return f"{who}: {said}" if said != text else _lines(f"{who}: {text}", frames)
    summary = error.summary
    for cause in error.causes.values():
        if cause.kind == "running":
            lines = [frame for frame in cause.frames if is_learners(frame.file)]
            summary = summary.replace(f"rank {cause.rank} {cause.text}", f"rank {cause.rank} is still at your line "
                                      f"{lines[-1].line}" if lines else f"rank {cause.rank} is still running")
    return _lines(CELL.sub("", summary), frames)


def _lines(what: str, frames: Sequence[Frame]) -> str:
    what, _, given = what.partition(f"\n{_CALLED}")
    lines = [_short(what)]
    if frames:
        source = linecache.getline(frames[-1].file, frames[-1].line).strip()
        lines.append(f"at your line {frames[-1].line}" + (f": {_short(source)}" if source else
                                                         f" ({place(frames[-1].file, frames[-1].line)})"))
    if given:
        lines.append(_short(_CALLED + given))
    return "\n".join(lines)


def _short(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " …"


@functools.cache
def is_learners(file: str) -> bool:
    """Whether it is a learner's source, and not a library's."""
    import tplab

    library = tplab.__file__.rpartition("__init__")[0]
    return not (is_machinery(file) or file.startswith((library, _STANDARD_LIBRARY, "<frozen"))
                or "site-packages" in file)


def tensor(value, dims: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """``value`` if it is a tensor of ``shape`` and ``dtype``; else :class:`NotYet`, in words.

    ``dims``: the dimensions' names, ``"tokens, heads, head_dim"``.
    """
    wanted = f"[{dims}] = {list(shape)}"
    if not isinstance(value, torch.Tensor):
        raise NotYet(f"it returns {kind(value)}; a tensor {wanted} must come back")
    if value.device.type != "cpu" or value.layout != torch.strided:
        raise NotYet(f"it returns a tensor on {value.device} with layout {value.layout}; an ordinary one, with numbers "
                     "in this computer's memory, must come back")
    if list(value.shape) != list(shape):
        raise NotYet(f"it returns {list(value.shape)}; {wanted} must come back{_permuted(value, dims, shape)}")
    if dtype is not None and value.dtype != dtype:
        raise NotYet(f"it returns {value.dtype}; {dtype} must come back")
    return value


def _permuted(value: torch.Tensor, dims: str, shape: Sequence[int]) -> str:
    names = [name.strip() for name in dims.split(",")]
    if len(set(shape)) == len(shape) == value.dim() and sorted(value.shape) == sorted(shape):
        return f" (yours is [{', '.join(names[list(shape).index(size)] for size in value.shape)}])"
    return ""


def kind(value) -> str:
    """A wrong answer in words: ``"nothing (is a return missing?)"``, ``"a list of 3"``, ``"a tensor [2, 3]"``.

    In one line, and without an address in memory.
    """
    if value is None:
        return "nothing (is a return missing?)"
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a numpy array {list(value.shape)}"
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, type) or inspect.isroutine(value):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__} itself"
    text, of = shown(value), type(value).__name__
    return f"an object of the class {of}" if " at 0x" in text or "\n" in text else f"{text} ({of})"


def _same(a, b) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and (torch.equal(a, b) or a.is_floating_point() and torch.allclose(a, b, 0, 0, equal_nan=True))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, int | float | str | bytes | bool | range | set | frozenset | type(None)):
        return a == b
    return True  # an object of the check's own: it watches itself


def for_each(cases: Iterable, check: Callable, what: Callable = lambda case: f"{case} ranks") -> None:
    """``check`` every case; an answer that is right in some and then wrong is told in which it was right."""
    passed = []
    for case in cases:
        try:
            check(case)
        except NotYet as wrong:
            if not passed or what(case) in passed or str(wrong).count("\n") > 1:
                raise
            raise NotYet(f"{wrong}\nOn {' and '.join(dict.fromkeys(passed))} it is right: is a number written down, or "
                         "a remainder left out?") from wrong
        passed.append(what(case))


def agree(value: torch.Tensor, right: torch.Tensor, mistakes: Mapping[str, torch.Tensor | tuple[torch.Tensor, ...]],
          otherwise: str, within: float = 1e-4) -> None:
    """Raise `NotYet` unless ``value`` is ``right`` to within ``within`` of its largest number.

    ``mistakes``: ``{sentence: what one would return who makes this mistake}``, or several such; the first sentence
    whose numbers are the same is said, else ``otherwise``. A mistake that does not show here is passed over.
    """
    def same(other: torch.Tensor) -> bool:
        return other.shape == value.shape and torch.allclose(
            value.double(), other.double(), rtol=0, atol=within * max(1.0, right.double().abs().max().item()))

    if not same(right):
        given = {says: one if isinstance(one, tuple) else (one,) for says, one in mistakes.items()}
        raise NotYet(next((says for says, some in given.items() if any(map(same, some))), otherwise))


def not_only(check: Callable, shown_case, hidden_case, says: str) -> None:
    """``check`` the hidden case; an answer that is wrong there and right in the case that was shown has written its
    numbers down, and ``says`` so."""
    try:
        check(hidden_case)
    except NotYet as wrong:
        try:
            check(shown_case)
        except NotYet:
            raise wrong from None
        raise NotYet(f"{says}: {wrong}") from None
