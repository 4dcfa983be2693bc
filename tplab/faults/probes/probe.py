"""``Probe``: a bug that the museum does not have, as broken code of a few lines, for its name alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tplab.patch import Patch, original


@dataclass(frozen=True)
class Probe:
    """A bug with one of its usual values."""

    name: str
    title: str
    patches: tuple[Patch, ...]
    ops: tuple[str, ...]  # the operations whose result it changes, as `tplab.align.points` names them


@dataclass(frozen=True)
class _Family:
    """A bug with all of its values."""

    name: str
    title: str
    ops: tuple[str, ...]
    target: str
    values: Callable[[object], Iterable] | Iterable
    make: Callable


FAMILIES: list[_Family] = []


def probe(name: str, ops: str, target: str, title: str, values: Callable[[object], Iterable] | Iterable = (None,)
          ) -> Callable:
    """Mark ``make(value)``, which returns what replaces ``target``.

    Args:
        name: the bug's name; several probes may have one name.
        ops: the operations whose result it changes, separated by blanks.
        target: dotted names below ``tplab``, separated by blanks; each gets the replacement.
        title: what is wrong, in a few words; ``{}`` stands for the value.
        values: those that are tried; or a function of the model's configuration that returns them.
    """
    def mark(make: Callable) -> Callable:
        FAMILIES.append(_Family(name, title, tuple(ops.split()), target, values, make))
        return make
    return mark


def probes(config) -> Iterable[Probe]:
    """Every probe with every value, for the model of a :class:`tplab.checkpoint.ModelConfig`."""
    for family in FAMILIES:
        for value in family.values(config) if callable(family.values) else family.values:
            wrong = family.make(value)
            patches = tuple(Patch(f"tplab.{target}", wrong) for target in family.target.split())
            yield Probe(family.name, family.title.format(value), patches, family.ops)


def was(target: str) -> Callable:
    """The clean engine's function of a probe's target (of several, the first)."""
    return original(f"tplab.{target.split()[0]}")
