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


_PROBES: list[Callable[[object], Iterable[Probe]]] = []


def probe(name: str, ops: str, target: str, title: str, wrong: Callable | None = None, *,
          needs: Callable[[object], object] = lambda config: True,
          each: Callable[[object], Iterable] | Iterable | None = None) -> Callable:
    """Add a bug: a call with ``wrong``, or a decorator of it.

    Args:
        name: the bug's name; several probes may have one name.
        ops: the operations whose result it changes, separated by blanks.
        target: dotted names below ``tplab``, separated by blanks; each gets the replacement.
        title: what is wrong, in a few words; ``{}`` stands for the value.
        wrong: the replacement; with ``each``, a function of a value that returns it.
        needs: whether it can show, by the model's :class:`tplab.checkpoint.ModelConfig`.
        each: the values that are tried, or a function of the configuration that returns them.
    """
    if wrong is None:
        return lambda wrong: probe(name, ops, target, title, wrong, needs=needs, each=each)

    def made(config) -> Iterable[Probe]:
        values = [None] if each is None else each(config) if callable(each) else each
        for value in values if needs(config) else ():
            broken = wrong if each is None else wrong(value)
            yield Probe(name, title.format(value), tuple(Patch(f"tplab.{one}", broken) for one in target.split()),
                        tuple(ops.split()))
    _PROBES.append(made)
    return wrong


def probes(config) -> Iterable[Probe]:
    """Every probe with every value, for a model."""
    for made in _PROBES:
        yield from made(config)


def was(target: str) -> Callable:
    """The clean engine's function of a probe's target (of several, the first)."""
    return original(f"tplab.{target.split()[0]}")
