"""Replace one function of tplab by another, by dotted name, for a while.

Faults are put into the clean engine in this way, and so are a learner's own functions from notebook cells. A patch that
is in force in the parent is in force on the ranks of every run as well: the pool sends it with the run. The patched
code needs no change. A patch is picklable when its replacement is (cloudpickle takes cell functions).
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

from tplab.checks import quoted
from tplab.errors import TplabError


class PatchError(TplabError):
    """There is no function of this dotted name, or the replacement cannot be called like the original."""


@dataclass(frozen=True)
class Patch:
    """``target`` (``"tplab.module.function"`` or ``"tplab.module.Class.method"``) is to be replaced."""

    target: str  # dotted name, as the code that calls it sees it
    replacement: Callable  # called with the original's arguments

    @property
    def patches(self) -> tuple["Patch", ...]:
        """Itself: whatever has ``patches`` can be applied."""
        return (self,)


@dataclass
class _Place:
    """A name that is replaced right now, and what stood there."""

    owner: object
    name: str
    original: object
    inherited: bool

    def put(self, patch: Patch | None) -> None:
        """Have the patch's replacement stand at the name; the original if there is none."""
        if patch is not None:
            setattr(self.owner, self.name, _like(self.original, patch.replacement))
        elif not self.inherited:
            setattr(self.owner, self.name, self.original)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


@dataclass(eq=False)
class _Block:
    """One ``with`` block, which lasts as long as its ``holder`` is there, and ``over`` is not said before."""

    patches: dict[tuple[int, str], Patch] = field(default_factory=dict)  # by the place of each; of two the last one
    holder: Callable = lambda: None  # a weak reference
    over: bool = False
    cleans: bool = False  # whether the patches of the blocks around it rest

    def is_alive(self) -> bool:
        return not self.over and self.holder() is not None


# Logical ranks are threads of one process: each applies the same patches, and the first one to finish must not take
# them away from the others.
_lock = threading.RLock()
_blocks: list[_Block] = []  # in the order in which they were entered
_places: dict[tuple[int, str], _Place] = {}


def _settle() -> dict[tuple[int, str], Patch]:
    """Have stand at each name what the blocks that are alive say; returns that.

    An interrupt may cut it short at any moment: the next call does all of it again.
    """
    with _lock:
        _blocks[:] = [block for block in _blocks if block.is_alive()]
        wanted = {}
        for block in _blocks:
            wanted = {} if block.cleans else wanted
            wanted.update(block.patches)
        for key, place in list(_places.items()):
            place.put(wanted.get(key))
            if not any(key in block.patches for block in _blocks):
                del _places[key]
        return wanted


def _like(original, replacement: Callable):
    kind = type(original)
    return kind(replacement) if kind in (staticmethod, classmethod) else replacement


def _find(target: str):
    """The object that owns the last name of ``target``, and that name."""
    parts = target.split(".")
    if parts[0] != "tplab":
        raise PatchError(f"only names below 'tplab' can be patched, not {target!r}")
    owner = module = import_module(parts[0])
    for i, part in enumerate(parts[1:-1], 2):
        if owner is module and hasattr(module, "__path__"):
            try:
                owner = module = import_module(name := ".".join(parts[:i]))
                continue
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise
        owner = getattr(owner, part, None)
    if owner is None or not callable(getattr(owner, parts[-1], None)):
        raise PatchError(f"there is no function {target!r}; {module.__name__} has " + ", ".join(
            sorted(n for n, v in vars(owner or module).items() if inspect.isfunction(v))))
    return owner, parts[-1]


def _place(target: str) -> tuple[tuple[int, str], _Place]:
    owner, name = _find(target)
    known = _places.get(key := (id(owner), name))
    return key, known or _Place(owner, name, inspect.getattr_static(owner, name), name not in vars(owner))


def original(target: str) -> Callable:
    """The function that ``target`` names in the clean engine, whether or not a patch stands there now."""
    with _lock:
        right = _place(target)[1].original
    return right.__func__ if isinstance(right, (staticmethod, classmethod)) else right


def in_force() -> tuple[Patch, ...]:
    """The patches that stand in this process now, one per replaced name. A pool sends them along with every run."""
    with _lock:
        return tuple(_settle().values()) if _places else ()


def _check_call(target: str, right: Callable, replacement: Callable) -> None:
    if not callable(replacement):
        raise PatchError(f"the replacement for {target} is {replacement!r}, which cannot be called")
    wanted = [p for p in inspect.signature(right).parameters.values()
              if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    try:
        inspect.signature(replacement).bind(*wanted)
    except TypeError as error:
        raise PatchError(f"{target} is called with ({', '.join(p.name for p in wanted)}), but the replacement takes "
                         f"{inspect.signature(replacement)}: {error}") from None


_MUSEUM = "tplab.faults"  # looked up when a name is given, as the targets are: no room above is imported to get here


def as_patches(patches) -> tuple[Patch, ...]:
    """A list of faults, names of faults and patches → its patches.

    Raises PatchError if it is no such list, FaultError if the museum has no fault of that name.
    """
    if isinstance(patches, str) or not isinstance(patches, Iterable):
        raise PatchError("patches must be a list of faults, their names or Patch objects, such as ['nan_mask'], "
                         f"not {quoted(patches)}")
    found = []
    for one in patches:
        one = import_module(_MUSEUM).fault(one) if isinstance(one, str) else one
        if not isinstance(getattr(one, "patches", None), tuple):
            raise PatchError(f"patches holds {quoted(one)}, which is no fault, no fault's name and no Patch")
        found += one.patches
    return tuple(found)


class _Exit:
    """``__exit__`` as the ``with`` statement takes it before it enters: made then, and held nowhere else.

    So it is freed with the block, even when an interrupt comes before the first line of a Python ``__exit__``.
    """

    def __get__(self, one: "applied | None", kind: type) -> Callable:
        if one is None:  # `contextlib.ExitStack` asks the class
            return lambda one, *exc: _leave(one._entered.pop(), *exc)
        block = _Block()
        leave = partial(_leave, block)
        block.holder = weakref.ref(leave)
        one._offered[threading.get_ident()] = block
        return leave


def _leave(block: _Block, *exc) -> None:
    block.over = True
    try:
        _settle()
    except BaseException:  # an interrupt: what it cut short is done now
        _settle()
        raise


class applied:
    """Apply every patch of ``patchables`` (as :func:`as_patches` takes them) and undo them all on the way out.

    Several threads of a process may enter it at once, as logical ranks do: a name has its original again when the last
    thread has left. The patches in force are those of the ``with`` blocks that are alive, so whatever an interrupt
    leaves is undone by the next entry, run or `in_force`. Raises PatchError if a target does
    not exist, or a replacement's parameters do not fit.
    """

    __exit__ = _Exit()

    def __init__(self, *patchables, clean: bool = False):
        self._patches, self._cleans = as_patches(patchables), clean
        self._offered: dict[int, _Block] = {}  # by thread: to the `with` statement that is about to enter
        self._entered: list[_Block] = []  # by an ExitStack, which holds this object instead

    def __enter__(self) -> None:
        block = self._offered.pop(threading.get_ident(), None)
        if block is None or not block.is_alive():  # an interrupt may have come before a `with` could enter
            block = _Block(holder=weakref.ref(self))
            self._entered.append(block)
        try:
            with _lock:
                _settle()
                for patch in self._patches:
                    key, place = _place(patch.target)
                    _check_call(patch.target, original(patch.target), patch.replacement)
                    _places[key], block.patches[key] = place, patch
                block.cleans = self._cleans
                _blocks.append(block)
                _settle()
        except BaseException:
            _leave(block)
            raise
