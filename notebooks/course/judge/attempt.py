"""A learner's function as a check sees it: called with copies, its mistakes said in at most three lines."""

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real

import numpy as np
import torch

from course.judge.compare import Made
from course.judge.memory import Memory
from course.judge.words import CALLED, NotYet, in_words, is_learners
from tplab.checks import counted, quoted
from tplab.ranks import OpRecord, logical_ranks, op_log, rank
from tplab.ranks.context import inside_rank
from tplab.ranks.errors import CollectiveMismatch, RankError

LIMIT = 5  # seconds that a call of a learner's code may take


class Uncopied:
    """What a learner's code gets as it is, and not as a copy: what is done to it is looked at, or counted, here."""

    def __deepcopy__(self, memo):
        return self


class Attempt:
    """The learner's function (or class), ``takes`` the names of what it is called with: ``"scores, mask"``.

    It gets copies of its arguments, the last ones ``given``; `NotYet` if it raises, cannot be called so, or writes into
    an argument that is not among ``writes``.
    """

    def __init__(self, function: Callable, takes: str, writes: str = ""):
        self.function, self.takes = kept(function, takes), [name.strip() for name in takes.split(",")]
        self.made = {}  # by rank: what the torch calls of the latest call made, line by line
        self.latest = {}  # by rank: what the latest call was given, and what it returned
        self.memory = Memory(self.function)
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
        here = rank() if inside_rank() else 0
        with Made() as made:
            self.made[here], self.latest[here] = made.found, (args, None)
            result, log = with_collectives(guarded, self.function, *given)
        self.latest[here] = args, result
        if self.memory is not None and not any(isinstance(arg, Uncopied) for arg in args):
            self.memory.note(args)
        if log and not inside_rank():
            at = f"your line {log[0].line}" if is_learners(log[0].file) else "it"
            raise NotYet(f"{at} calls {log[0]}; no collective belongs here: each rank has what this function needs")
        for name, arg, after in zip(self.takes, args, given):
            if name not in self.writes and not _same(arg, after):
                raise NotYet(f"it {'returns nothing, and ' * (result is None)}changes its argument {name}, which its "
                             "caller still needs: work on a copy")
        return result

    def unchanged(self) -> str:
        """The argument that the latest call returned as it was, alone or among others, if it returned one."""
        args, result = self.latest.get(0, ((), None))
        results = [one for one in (result if isinstance(result, list | tuple) else [result])
                   if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
        return next((name for name, arg in zip(self.takes, args) if any(
            isinstance(arg, torch.Tensor) and _same(arg, one) for one in results)), "")

    def unread(self, spare: str) -> list[str]:
        """The parameters, besides ``spare``, that no line of a function reads."""
        function = inspect.unwrap(self.function)
        if not inspect.isfunction(function) or function.__code__.co_flags & (
                inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            return []
        read, codes = set(), [function.__code__]
        for code in codes:
            codes += [inner for inner in code.co_consts if inspect.iscode(inner)]
            read |= {step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")}
        return [own for name, own in zip(self.takes, inspect.signature(function).parameters)
                if own not in read and name != spare]

    def __getstate__(self) -> dict:  # for a pool's ranks
        return vars(self) | {"made": {}, "latest": {}, "memory": None}

    def tensor(self, *args, dims: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """What it returns for ``args``, refused unless it is a tensor of that shape; ``dims`` names its dimensions."""
        return tensor(self(*args), dims, shape, dtype)


def on_ranks(ranks, function: Callable, *args, waits: str = "", asks: Mapping[str, str] | None = None,
             timeout: float | None = None) -> list[tuple[object, list[OpRecord]]]:
    """What ``function(*args)`` returns on each rank, and the collectives that it took part in; `NotYet` if one fails.

    ``ranks``: how many logical ones (threads), or a pool. ``waits`` is asked where ranks wait for one that does not
    come, and of ``asks`` what stands with words of the error.
    """
    try:
        if isinstance(ranks, int):
            return logical_ranks(ranks, with_collectives, function, *args, timeout=LIMIT)
        return ranks.run(with_collectives, function, *args, timeout=timeout)
    except RankError as error:
        kind = error.first.kind if error.first is not None else ""
        more = _parted(error) or waits if kind in ("waiting", "running") else ""
        more = more or "What ends it?" * (kind == "running")
        if isinstance(error, CollectiveMismatch):
            more = ("All ranks must make the same call, with tensors of the same dtype and, where no sizes=[…] are "
                    "given, of the same shape")
        lines = in_words(error).splitlines()
        more = next((says for words, says in (asks or {}).items() if words in "\n".join(lines)), more)
        raise NotYet("\n".join([*lines[:2 if more else 3], *[more] * bool(more)])) from error


def _parted(error: RankError) -> str:
    """The first collective that ranks have called at different lines, or how often each has called the only one."""
    for number, records in enumerate(zip(*error.logs), 1):
        if len({record.line for record in records if is_learners(record.file)}) > 1:
            return f"Collective {number} is in line " + ", ".join(
                f"{record.line} on rank {r}" for r, record in enumerate(records))
    lines = {record.line for log in error.logs for record in log if is_learners(record.file)}
    if len(lines) == 1 and all(error.logs) and len({*map(len, error.logs)}) > 1:
        return f"Line {lines.pop()} is reached " + ", ".join(
            f"{counted(len(log), 'time')} on rank {r}" for r, log in enumerate(error.logs))
    return ""


def with_its_own(function: Callable, *args):
    """On a rank: ``function`` of this rank's own of each of ``args``."""
    return function(*(each[rank()] for each in args))


def with_collectives(function: Callable, *args) -> tuple[object, list[OpRecord]]:
    before = max((record.seq for record in op_log()), default=0)
    return function(*args), [record for record in op_log() if record.seq > before]


def count_ops(ran: Sequence[tuple[object, list[OpRecord]]], wanted: dict[str, int]) -> None:
    """`NotYet` unless every rank of :func:`on_ranks` took part in just these collectives: ``{"all_reduce": 1}``."""
    for r, (_, log) in enumerate(ran):
        if sorted(record.op for record in log) != sorted(op for op, count in wanted.items() for _ in range(count)):
            said = ", ".join(counted(count, op) for op, count in wanted.items()) or "no collective"
            raise NotYet(f"rank {r} of {len(ran)} calls {', '.join(record.op for record in log) or 'no collective'}; "
                         f"{said} must be enough")


def ranks_in_words(ranks: Sequence[int], size: int) -> str:
    """``"rank 1"``, ``"ranks 1 and 2"``, ``"every rank"``."""
    if len(ranks) == size > 1:
        return "every rank"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def guarded(function: Callable, *args, **kwargs):
    """Call the learner's code; an exception, a coroutine or a generator becomes `NotYet`."""
    try:
        with as_it_was():
            found = function(*args, **kwargs)
        if inspect.iscoroutine(found) or inspect.isgenerator(found):
            found.close()  # or Python warns that it was never awaited
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
            raise  # the caller of the ranks has the source of the cell, and sees which ranks say the same
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
    """The function, with everything as it was behind each of its calls; an exception says what the call was given."""
    if not inspect.isroutine(function):
        return function

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            with as_it_was():
                return function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            if not isinstance(error, RecursionError):
                error.add_note(f"it{CALLED}{given_in_words(takes, args)}")
            raise

    return call


def given_in_words(takes: str, args: Sequence) -> str:
    """What a call was given, in a few words: ``"q [5, 4, 6], scaling 0.3"``."""
    return ", ".join(f"{name.strip()} {_given(arg)}" for name, arg in zip(takes.split(","), args))


def _given(arg) -> str:
    if isinstance(shape := getattr(arg, "shape", None), tuple):
        return str(list(shape))
    text = f"({', '.join(map(_given, arg))})" if isinstance(arg, tuple) or (
        isinstance(arg, list) and arg and hasattr(arg[0], "shape")) else quoted(arg)
    return text if len(text) <= 40 and " at 0x" not in text else f"({type(arg).__name__})"


class Object:
    """An object of the learner's class: its methods are called with copies, as :class:`Attempt` calls a function."""

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


def tensor(value, dims: str, shape: Sequence[int], dtype=None, it: str = "it returns") -> torch.Tensor:
    """``value`` if it is a tensor of ``shape`` and ``dtype``; else `NotYet`. ``dims``: ``"tokens, heads"``."""
    wanted = f"[{dims}] = {list(shape)}"
    if not isinstance(value, torch.Tensor):
        raise NotYet(f"{it} {kind(value)}; a tensor {wanted} must come back")
    if value.device.type != "cpu" or value.layout != torch.strided:
        raise NotYet(f"{it} a tensor on {value.device} with layout {value.layout}; an ordinary one, with numbers "
                     "in this computer's memory, must come back")
    if list(value.shape) != list(shape):
        names, turned = dims.split(", "), sorted(value.shape) == sorted(shape) and len(set(shape)) == value.dim()
        given = f" (yours is [{', '.join(names[list(shape).index(size)] for size in value.shape)}])" if turned else (
            " (where is the dimension of 1? A squeeze takes all of them)" if 1 in shape and
            sorted(value.shape) == sorted(size for size in shape if size > 1) else "")
        raise NotYet(f"{it} {list(value.shape)}; {wanted} must come back{given}")
    if dtype is not None and value.dtype != dtype:
        raise NotYet(f"{it} {value.dtype}; {dtype} must come back")
    return value


def several(value, what: str, count: int = 2) -> list:
    """``value``, a list or tuple of so many, as a list; else :class:`NotYet`. ``what``: what they are."""
    if not isinstance(value, list | tuple) or len(value) != count:
        raise NotYet(f"it returns {kind(value)}; {what} must come back")
    return list(value)


def kind(value) -> str:
    """A wrong answer in one line, without an address in memory: ``"a list of 3"``, ``"a tensor [2, 3]"``."""
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
    text, of = quoted(value), type(value).__name__
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


@contextmanager
def saying(head: str) -> Iterator[None]:
    """What is wrong inside is said behind ``head``."""
    try:
        yield
    except NotYet as wrong:
        raise NotYet(f"{head}{wrong}") from wrong.__cause__ or wrong


def for_each(cases: Iterable, check: Callable, what: Callable = lambda case: f"{case} ranks", shown=None):
    """``check`` every case; an answer that is right in some and then wrong is told in which ones it was right.
    ``shown``: a case that the notebook shows, behind its name; it is looked at where another is wrong."""
    def told(case) -> NotYet | None:
        try:
            return check(case)
        except NotYet as wrong:
            return wrong

    passed = []
    for case in cases:
        if (wrong := told(case)) is not None:
            if shown is not None:
                passed += [shown[0]] * (told(shown[1]) is None)
                told(case)  # again: what the latest call was given and gave is looked at
            if not passed or what(case) in passed or str(wrong).count("\n") > 1:
                raise wrong
            raise NotYet(f"{wrong}\nOn {' and '.join(dict.fromkeys(passed))} it is right") from wrong
        passed.append(what(case))


def one_number(value, what: str = "a number") -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = tensor(value, "", value.shape).item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise NotYet(f"it returns {kind(value)}; {what} must come back")
    return float(value)


def whole_numbers(value, what: str) -> list[int]:
    """``value``, a list or tuple of ints, as a list; NotYet if it is none. ``what``: what they are."""
    if not isinstance(value, list | tuple):
        raise NotYet(f"it returns {kind(value)}; a list of whole numbers must come back, {what}")
    if strange := [one for one in value if type(one) is not int]:
        given = text if len(text := quoted(value)) < 60 else f"{kind(strange[0])} among them"
        raise NotYet(f"it returns {given}; whole numbers must come back, {what}")
    return list(value)
