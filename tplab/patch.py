"""Replace one function of tplab by another, by dotted name, for a while.

Faults are put into the clean engine in this way, and so are a learner's own functions from notebook cells. A patch that
is in force in the parent is in force on the ranks of every run as well: the pool sends it with the run. The patched
code needs no change. A patch is picklable when its replacement is (cloudpickle takes cell functions).
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

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


# Logical ranks are threads of one process: each applies the same patches, and the first one to finish must not take
# them away from the others. So all blocks that have been entered are listed, and of one name the last block's counts.
_Key = tuple[object, str]  # a module or class, and a name in it
_lock = threading.RLock()
_blocks: list[dict[_Key, Patch]] = []  # of each block its patches
_originals: dict[_Key, tuple[object, bool]] = {}  # what stands there in the clean engine; whether it is inherited


def _wanted() -> dict[_Key, Patch]:
    return {key: patch for block in _blocks for key, patch in block.items()}


def _settle() -> None:
    """Have stand at each name what the blocks say. An interrupt may cut it short: the next call does all of it again.
    """
    wanted = _wanted()
    for (owner, name), (right, is_inherited) in list(_originals.items()):
        if patch := wanted.get((owner, name)):
            kind, new = type(right), patch.replacement
            setattr(owner, name, kind(new) if kind in (staticmethod, classmethod) else new)
            continue
        if not is_inherited:
            setattr(owner, name, right)
        elif name in vars(owner):
            delattr(owner, name)
        del _originals[owner, name]


def _find(target: str) -> tuple[_Key, tuple[object, bool]]:
    """The place that ``target`` names, and what ``_originals`` has or would have for it."""
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
    key = owner, parts[-1]
    return key, _originals.get(key) or (inspect.getattr_static(*key), parts[-1] not in vars(owner))


def original(target: str) -> Callable:
    """The function that ``target`` names in the clean engine, whether or not a patch stands there now."""
    with _lock:
        right: Any = _find(target)[1][0]
    return right.__func__ if isinstance(right, (staticmethod, classmethod)) else right


def in_force() -> tuple[Patch, ...]:
    """The patches that stand in this process now, one per replaced name. A pool sends them along with every run."""
    return tuple(_wanted().values()) if _blocks else ()


def _check_call(target: str, replacement: Callable) -> None:
    if not callable(replacement):
        raise PatchError(f"the replacement for {target} is {replacement!r}, which cannot be called")
    wanted = [p for p in inspect.signature(original(target)).parameters.values()
              if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    try:
        inspect.signature(replacement).bind(*wanted)
    except TypeError as error:
        raise PatchError(f"{target} is called with ({', '.join(p.name for p in wanted)}), but the replacement takes "
                         f"{inspect.signature(replacement)}: {error}") from None


def as_patches(patches) -> tuple[Patch, ...]:
    """A list of faults and patches → its patches. Raises PatchError if it is no such list."""
    if isinstance(patches, str) or not isinstance(patches, Iterable):
        raise PatchError(f"patches must be a list of faults or Patch objects, not {quoted(patches)}")
    flat: list[Patch] = []
    for patchable in patches:
        if not isinstance(getattr(patchable, "patches", None), tuple):
            raise PatchError(f"patches holds {quoted(patchable)}, which is no fault and no Patch")
        flat += patchable.patches
    return tuple(flat)


@contextmanager
def applied(*patchables, clean: bool = False) -> Iterator[None]:
    """Apply every patch of ``patchables`` (as :func:`as_patches` takes them) and undo them all on the way out.

    Several threads of a process may enter it at once, as logical ranks do: a name has its original again when the last
    thread has left. ``clean``: the patches of the blocks around this one rest. Raises PatchError if a target does not
    exist, or a replacement's parameters do not fit.
    """
    block: dict[_Key, Patch] = {}
    try:
        with _lock:
            if clean:
                block = {key: Patch(patch.target, original(patch.target)) for key, patch in _wanted().items()}
            for patch in as_patches(patchables):
                key, right = _find(patch.target)
                _check_call(patch.target, patch.replacement)
                _originals[key], block[key] = right, patch
            _blocks.append(block)
            _settle()
        yield
    finally:
        with _lock:
            _blocks[:] = [other for other in _blocks if other is not block]
            _settle()
