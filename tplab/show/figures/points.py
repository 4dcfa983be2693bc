"""Inside one layer: every trace point's difference, in the order of the computation."""

from collections.abc import Mapping
from itertools import groupby

from tplab.checks import span
from tplab.errors import TplabError
from tplab.show.figures.diffs import label_differences
from tplab.show.figures.scale import DifferenceAxis
from tplab.show.figures.style import STAGES, Picture, looks, picture, styled
from tplab.show.phrases import describe_point, distance, dtype_name

_TITLE = 90  # characters that fit above the figure


@styled
def points_figure(reports, layer: int | None = None, title: str | None = None) -> Picture:
    """All trace points of one layer, so that "K differs while V matches" can be seen.

    ``reports``: an ``AlignReport``, or ``{label: AlignReport}`` to lay several faults side by side. ``layer``: its
    number; the layer in which the first report leaves the floor, if not given.

        >>> show.points_figure({"no rotation": a, "wrong theta": b}, layer=0)
    """
    reports = reports if isinstance(reports, Mapping) else {reports.engine: reports}
    if not reports:
        raise TplabError("there is no report to draw; give a report or {label: report}")
    first = next(iter(reports.values()))
    layer = _first_layer(first) if layer is None else layer
    points = {label: [p for p in r.points if p.name.startswith(f"layers.{layer}.")] for label, r in reports.items()}
    if not all(points.values()):
        layers = sorted({int(p.name.split(".")[1]) for p in first.points if p.name.startswith("layers.")})
        there = f"{first.model} has {span(layers).replace('–', ' to ')}" if layers else "points of none were recorded"
        raise TplabError(f"there is no layer {layer!r}; {there}")
    names = [p.name.rpartition(".")[2] for p in next(iter(points.values()))]
    figure, ax = picture(9.0, 4.3)
    _draw(ax, points, {dtype_name(r): r.floor for r in reports.values()})
    ax.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    ax.set_xlabel(f"points of layer {layer}, in the order of the computation")
    label_differences(ax, reports)
    details = ". ".join(f"{label}: {', '.join(_groups(of_label))}" for label, of_label in points.items())
    return figure.finished(title or _finding(points, layer), columns=3,
                           words=f"the trace points of layer {layer}, difference from Hugging Face. {details}.")


def _first_layer(report) -> int:
    """In which the report leaves the floor; else the first that there is."""
    points = [*filter(None, [report.first_divergence]), *report.points]
    return next((int(point.name.split(".")[1]) for point in points if point.name.startswith("layers.")), 0)


def _draw(ax, points, floors) -> None:
    values = {label: [distance(p) for p in of_label] for label, of_label in points.items()}
    if len(points) == 1:  # the colours are free to say which points are inside the floor
        (of_label,), (numbers,) = points.values(), values.values()
        values = {"outside the floor": [None if p.inside else v for p, v in zip(of_label, numbers)],
                  "inside": [v if p.inside else None for p, v in zip(of_label, numbers)]}
        colours = {"outside the floor": STAGES["seed engine"], "inside": STAGES["finished"]}
    else:
        colours = looks(values)
    axis = DifferenceAxis(ax, values, floors)
    low, apart = ax.get_ylim()[0], 0.22 * (len(points) > 1)
    for depth, numbers in enumerate(values.values()):
        for x, value in enumerate(numbers):
            if value is not None:
                x += apart * (depth - (len(values) - 1) / 2)
                ax.vlines(x, low, axis.height(value), color="#c4c4c4", lw=1, zorder=2)
    axis.draw(colours, joined=False, apart=apart)
    ax.set_xlim(-0.6, len(numbers) - 0.4)


def _finding(points, layer) -> str:
    if len(points) > 1:
        first = {label: next((p.name.rpartition(".")[2] for p in some if not p.inside), "none")
                 for label, some in points.items()}
        said = f"Layer {layer}: first off the floor: " + ", ".join(
            f"{name} ({', '.join(label for label in first if first[label] == name)})"
            for name in dict.fromkeys(first.values()))
        return said if len(said) <= _TITLE else f"Layer {layer}: where each one leaves Hugging Face"
    by_name = {p.name.rpartition(".")[2]: p.inside for p in next(iter(points.values()))}
    outside = [name for name, inside in by_name.items() if not inside]
    if not outside:
        return f"Layer {layer}: every point is inside the floor"
    if outside[0] in ("q_rope", "k_rope") and by_name.get("v"):  # of a recorded engine it may be missing
        which = "Q and K differ" if {"q_rope", "k_rope"} <= set(outside) else f"{outside[0][0].upper()} differs"
        return f"Layer {layer}: after RoPE {which}, while V matches: an error of position"
    before = list(by_name)[:list(by_name).index(outside[0])]
    return f"Layer {layer}: {outside[0]} is the first point off the floor" + ("; all before it match" if before else "")


def _groups(points) -> list[str]:
    """Neighbouring points with the same description, together: ``"input_norm to v inside the floor"``."""
    groups = [(difference, [point.name.rpartition(".")[2] for point in alike])
              for difference, alike in groupby(points, describe_point)]
    return [f"{names[0]}{f' to {names[-1]}' * (len(names) > 1)} {difference}" for difference, names in groups]
