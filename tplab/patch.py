"""Replace one function of tplab by another, by dotted name, for a while.

This is how a fault is put into the clean engine, and how a learner's own function from a notebook cell is. What is in
force in the parent is in force on the ranks of every run as well: the pool sends it along, and the code that is patched
knows nothing of it. A patch is picklable when its replacement is (cloudpickle takes cell functions).
"""

import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module

from tplab.checks import shown
from tplab.errors import TplabError


class PatchError(TplabError):
    """The dotted name leads nowhere, or the replacement cannot be called as the original is."""


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
    """A name that is replaced right now: what stood there, and the layers in force, the last one on top."""

    owner: object
    name: str
    original: object
    inherited: bool
    layers: list["_Layer"] = field(default_factory=list)

    def settle(self) -> None:
        """Put what must stand at the name there. May be done again at any time."""
        if self.layers:
            setattr(self.owner, self.name, _like(self.original, self.layers[-1].patch.replacement))
        elif not self.inherited:
            setattr(self.owner, self.name, self.original)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


@dataclass(eq=False)
class _Layer:
    """One use of a patch; two threads' uses of the same patch are two layers."""

    patch: Patch
    place: _Place | None = None

    def put(self) -> None:
        """Bring it into force. Wherever this is cut short, `take` puts things right."""
        target = self.patch.target
        _check_call(target, original(target), self.patch.replacement)
        with _lock:
            self.place = place = _place(target)
            _places[id(place.owner), place.name] = place
            place.layers.append(self)
            place.settle()

    def take(self) -> None:
        """Undo it, as far as it has come; may be done again."""
        with _lock:
            place = self.place
            if place is None:
                return
            if self in place.layers:
                place.layers.remove(self)
            if _places.get(key := (id(place.owner), place.name)) is place:
                place.settle()
                if not place.layers:
                    del _places[key]


# Logical ranks are threads of one process: each applies the same patches, and the first one to finish must not take
# them away from the others.
_lock = threading.RLock()
_places: dict[tuple[int, str], _Place] = {}


def _like(original, replacement: Callable):
    kind = type(original)
    return kind(replacement) if kind in (staticmethod, classmethod) else replacement


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


def _place(target: str) -> _Place:
    owner, name = _find(target)
    known = _places.get((id(owner), name))
    return known or _Place(owner, name, inspect.getattr_static(owner, name), name not in vars(owner))


def original(target: str) -> Callable:
    """The function that ``target`` names in the clean engine, whether or not a patch stands there now."""
    with _lock:
        right = _place(target).original
    return right.__func__ if isinstance(right, (staticmethod, classmethod)) else right


def in_force() -> tuple[Patch, ...]:
    """The patches that stand in this process now, one per replaced name. A pool sends them along with every run."""
    with _lock:
        return tuple(place.layers[-1].patch for place in _places.values() if place.layers)


def _check_call(target: str, right: Callable, replacement: Callable) -> None:
    if not callable(replacement):
        raise PatchError(f"the replacement for {target} is {replacement!r}, which cannot be called")
    wanted = [p for p in inspect.signature(right).parameters.values()
              if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
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
                         f"not {shown(patches)}")
    found = []
    for one in patches:
        one = import_module(_MUSEUM).fault(one) if isinstance(one, str) else one
        if not isinstance(getattr(one, "patches", None), tuple):
            raise PatchError(f"patches holds {shown(one)}, which is no fault, no fault's name and no Patch")
        found += one.patches
    return tuple(found)


class applied:
    """Apply every patch of ``patchables`` (as :func:`as_patches` takes them) and undo them all on the way out.

    May be entered by several threads of a process at once, as logical ranks do: a name is clean again when the last
    of them has left. An interrupt that comes while patches are applied or undone leaves none behind. Raises
    PatchError if a target does not exist, or a replacement's parameters do not fit.
    """

    def __init__(self, *patchables):
        self._layers = [_Layer(patch) for patch in as_patches(patchables)]

    def __enter__(self) -> None:
        try:
            for layer in self._layers:
                layer.put()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc) -> None:
        try:
            self._undo()
        finally:  # again, for an interrupt may have cut it short
            self._undo()

    def _undo(self) -> None:
        for layer in reversed(self._layers):
            layer.take()
