"""Replace one function of tplab by another, by dotted name, for a while.

This is how a fault is put into the clean engine, and how a learner's own function from a notebook cell is: the same
mechanism, in the parent and on ranks. A patch is picklable when its replacement is (cloudpickle takes cell functions).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module

from tplab.errors import TplabError


class PatchError(TplabError):
    """The dotted name leads nowhere, or the replacement cannot be called as the original is."""


@dataclass(frozen=True)
class Patch:
    """``target`` (``"tplab.module.function"`` or ``"tplab.module.Class.method"``) is to be replaced.

    Attributes:
        target: dotted name, as the code that calls it sees it.
        replacement: called with the original's arguments.
    """

    target: str
    replacement: Callable

    @property
    def patches(self) -> tuple["Patch", ...]:
        """Itself: whatever has ``patches`` can be applied."""
        return (self,)


def _find(target: str):
    """The object that owns the last name of ``target``, and that name."""
    parts = target.split(".")
    if parts[0] != "tplab":
        raise PatchError(f"only names below 'tplab' can be patched, not {target!r}")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            owner = import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part, None)
        if owner is None or not callable(getattr(owner, parts[-1], None)):
            raise PatchError(f"there is no function {target!r}; {name} has "
                             + ", ".join(sorted(n for n, v in vars(owner or import_module(name)).items()
                                                if inspect.isfunction(v))))
        return owner, parts[-1]
    raise PatchError(f"there is no module on the way to {target!r}")


def _check_call(target: str, original: Callable, replacement: Callable) -> None:
    if not callable(replacement):
        raise PatchError(f"the replacement for {target} is {replacement!r}, which cannot be called")
    wanted = [p for p in inspect.signature(original).parameters.values()
              if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    try:
        inspect.signature(replacement).bind(*wanted)
    except TypeError as error:
        raise PatchError(f"{target} is called with ({', '.join(p.name for p in wanted)}), but the replacement takes "
                         f"{inspect.signature(replacement)}: {error}") from None


@contextmanager
def applied(*patchables) -> Iterator[None]:
    """Apply every patch of ``patchables`` (patches, faults) and undo them all on the way out, in reverse order.

    Raises:
        PatchError: a target does not exist, or a replacement's parameters do not fit.
    """
    with ExitStack() as undo:
        for patch in (patch for patchable in patchables for patch in patchable.patches):
            owner, name = _find(patch.target)
            original = inspect.getattr_static(owner, name)
            _check_call(patch.target, getattr(owner, name), patch.replacement)
            setattr(owner, name, patch.replacement)
            undo.callback(setattr, owner, name, original)
        yield
