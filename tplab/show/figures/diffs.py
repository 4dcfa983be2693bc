"""The figure of the lab: the difference from Hugging Face along the forward pass, one line per model."""

from collections.abc import Mapping

from tplab.errors import TplabError
from tplab.show.figures.scale import DifferenceAxis
from tplab.show.figures.style import STAGES, Picture, looks, picture, styled
from tplab.show.phrases import describe, distance, dtype_name

ENDS = ("embed", "output", "norm", "logits")


@styled
def diff_figure(reports: Mapping, title: str | None = None) -> Picture:
    """The difference from Hugging Face after every layer, one line per report, with the rounding floor as a band.

    NaN is in a separate row at the top, exact agreement in one at the bottom. ``reports``: ``{label:
    AlignReport}``, all of one model. Stages of the series and ``"broken"``/``"fixed"`` have fixed colours and markers.
    Here and in all figures ``title`` is the finding; it is written from the data if not given.

        >>> show.diff_figure({"broken": align(model, prompt, patches=["nan_mask"]), "fixed": align(model, prompt)})
    """
    names = _shared_points(reports)
    values = {label: [distance(report[name]) for name in names] for label, report in reports.items()}
    figure, ax = picture(9.0, 4.3 + 0.18 * len(reports))
    axis = DifferenceAxis(ax, values, {dtype_name(r): r.floor for r in reports.values()}, _lost(reports, names))
    axis.draw(looks(reports, [r.ok for r in reports.values()]),
              {label: f"{label}: {_first(report)}" for label, report in reports.items()})
    _layer_ticks(ax, names)
    label_differences(ax, reports)
    return figure.finished(title or finding(reports), f"{_what(reports)} after every layer. {describe(reports)}.",
                           columns=1 if len(reports) < 3 else 2)


def staircase(reports: Mapping, title: str | None = None) -> Picture:
    """The whole series in one figure: one line per stage, each repair a step down to the rounding floor.

    ``reports``: ``{stage: AlignReport}`` with stages of :data:`tplab.show.STAGES`, oldest first.

        >>> show.staircase({"seed engine": seed, "after 01": no_nan, "after 02": dim0})
    """
    unknown = [label for label in reports if label not in STAGES]
    if unknown:
        raise TplabError(f"{unknown[0]!r} is no stage of the series; the stages are {', '.join(map(repr, STAGES))}")
    return diff_figure(reports, title or _stairs_finding(reports))


def _shared_points(reports) -> list[str]:
    if not reports:
        raise TplabError("there is no report to draw; give {label: report}")
    names = [[p.name for p in report.points if p.name.rpartition(".")[2] in ENDS] for report in reports.values()]
    if any(other != names[0] for other in names):
        raise TplabError("the reports are of models with different numbers of layers; draw each in a figure of "
                         "its own")
    if not names[0]:
        raise TplabError("no layer's output and no end of the model was recorded; show.points_figure draws what was")
    return names[0]


def _layer_ticks(ax, names) -> None:
    layers = [at for at, name in enumerate(names) if name.startswith("layers.")]
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, len(layers)) if len(layers) / s <= 12)
    ends = set(range(len(names))) - set(layers)
    at = sorted(ends | set(layers[::step]))
    ax.set_xticks(at, [names[i] if i in ends else names[i].split(".")[1] for i in at])
    ax.set_xlim(-0.5, len(names) - 0.5)
    for i, label in zip(at, ax.get_xticklabels()):
        if i in ends:
            label.set(rotation=55 if len(layers) > 16 else 30, ha="right", rotation_mode="anchor")
    ax.set_xlabel("where it is measured: embedding, each layer's output, final norm, logits")


def label_differences(ax, reports: Mapping) -> None:
    """The vertical axis's name and grid, in every figure of differences."""
    engines = {report.engine for report in reports.values()}
    ax.set_ylabel(f"largest |{engines.pop() if len(engines) == 1 else 'engine'} − HF|,\n"
                  "relative to HF's largest value")
    ax.grid(axis="y", zorder=0.5)


def _lost(reports, names) -> str:
    points = [report[name] for report in reports.values() for name in names]
    kinds = {"NaN": any(p.nan for p in points), "inf": any(p.inf for p in points)}
    return " or ".join(what for what, there in kinds.items() if there) or "NaN"


def _first(report) -> str:
    first = report.first_divergence  # a recorded engine that stopped can be wrong without one
    return "inside the floor" if first is None else f"first outside at {first.name}"


def _what(reports) -> str:
    by_dtype = {dtype_name(r): r.floor for r in reports.values()}
    floors = " and ".join(f"{name}: floor {floor:.0e}".replace("e-0", "e-") for name, floor in by_dtype.items())
    return f"largest difference from Hugging Face, relative to its largest value ({floors}),"


def finding(reports: Mapping) -> str:
    """The title of a figure of these reports: which leaves the floor where."""
    bad = {label: report for label, report in reports.items() if report.first_divergence}
    good = [label for label in reports if label not in bad]
    if not bad:
        return "Only rounding is left: every point is inside the floor"
    label, report = next(iter(bad.items()))
    subject = f"“{label}”" if len(reports) > 1 else "The model"
    finding = f"{subject} leaves the floor at {report.first_divergence.name}"
    return finding + (f"; “{good[-1]}” never does" if good else "")


def _stairs_finding(reports) -> str:
    label, report = list(reports.items())[-1]
    if report.first_divergence is None:
        return f"Every point of “{label}” is inside the rounding floor"
    return f"“{label}” still leaves the floor, at {report.first_divergence.name}: there are bugs left"
