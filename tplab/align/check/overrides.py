"""Names given by the person who recorded: ``{pattern: point}``.

A pattern has ``fnmatch``'s form (``*``, ``?``, ``[…]``), and ``{i}`` in it is the layer's number. It is compared with
the names of modules, whose output it means, and of tensors recorded with ``rec.tensor``. ``name:in`` is a module's
first input; ``name:out.1`` and ``name:in.residual`` are the output or input of that number or name. The first pattern
that fits a tensor counts. A point is one of :mod:`tplab.align.points` or one of the fused ``qkv`` and ``gate_up``;
``""`` says that a tensor is no point.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import translate

from tplab.align.points import LAYER_POINTS, OUTER
from tplab.align.recording import PlacementError
from tplab.checks import did_you_mean, quoted

_INNER = (*LAYER_POINTS, "qkv", "gate_up")


def check_names(names, known: set[str]) -> dict[str, str]:
    """``names`` itself, with every point written out (``layers.{i}.q``); ``known``: the names that were recorded.

    Raises PlacementError: not a dictionary of texts, an unknown point, a pattern that fits no name or lacks its
    ``{i}``.
    """
    if not isinstance(names, Mapping | None):
        raise PlacementError(f"names must be a dictionary {{pattern: point}}, not {quoted(names)}")
    checked = {}
    for pattern, point in (names or {}).items():
        if not isinstance(pattern, str) or not isinstance(point, str):
            raise PlacementError("names must hold texts {pattern: point}, not "
                                 f"{{{quoted(pattern)}: {quoted(point)}}}")
        short = point.removeprefix("layers.{i}.")
        if short not in (*OUTER, *_INNER, ""):
            near = did_you_mean(short, (*OUTER, *_INNER), 1) or f"; points are {', '.join((*OUTER, *_INNER))}"
            raise PlacementError(f"names: there is no point {quoted(point)}{near}")
        if pattern.count("{i}") > 1 or (short and (short in _INNER) != ("{i}" in pattern)):
            raise PlacementError(f"names: {point} is {'a point of each layer' if short in _INNER else 'no layer’s'}, "
                                 f"so {pattern!r} must hold {{i}} {'once' if short in _INNER else 'nowhere'}")
        if not any(_fits(pattern, name) for name in known):
            near = get_close_matches(pattern.partition(":")[0], known, 1, 0)
            raise PlacementError(f"names: {pattern!r} fits nothing that was recorded"
                                 + (f"; the nearest name is {near[0]!r}" if near else ""))
        checked[pattern] = f"layers.{{i}}.{short}" if short in _INNER else short
    return checked


def _fits(pattern: str, name: str) -> re.Match | None:
    parts = pattern.partition(":")[0].split("{i}")
    return re.fullmatch(r"(\d+)".join(re.sub(r"\\[zZ]$", "", translate(part)) for part in parts), name)


def overridden(entry, names: Mapping[str, str]) -> str | None:
    """The point that ``names`` gives a tensor: ``""`` for no point, None if no pattern fits."""
    for pattern, point in names.items():
        kind, _, path = pattern.partition(":")[2].partition(".")
        first = (path,) if path else ("", "0", *(("x", "input", "hidden_states") if kind == "in" else ()))
        meant = not kind if entry.kind == "tensor" else entry.kind == (kind or "out") and entry.path in first
        if (meant or not point and not kind) and (match := _fits(pattern, entry.name)):
            return point.format(i=int(match.group(1))) if "{i}" in pattern else point
    return None
