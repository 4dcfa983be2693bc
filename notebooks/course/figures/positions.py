"""One trace point along the prompt: at which token does the difference begin, and does it grow with the distance?"""

from collections.abc import Mapping

from tplab.errors import TplabError
from tplab.show.figures.diffs import label_differences
from tplab.show.figures.scale import DifferenceAxis
from tplab.show.figures.style import Picture, looks, picture, styled
from tplab.show.phrases import dtype_name, magnitude, row_distances


@styled
def position_figure(reports: Mapping, point: str = "layers.0.q_rope", first: int | None = 16,
                    title: str | None = None) -> Picture:
    """The difference from Hugging Face at one point, token by token along the beginning of the prompt.

    ``reports``: ``{label: AlignReport}`` over the same prompt. ``point``: a trace point among each report's evidence:
    of its first divergent layer, or an end of the model. ``first``: how many tokens are drawn; all if None. More than
    two reports get a panel each.

        >>> figures.position_figure({"no rotation": a, "wrong theta": b}, "layers.0.q_rope")
    """
    values = {label: row_distances(report, point, label)[:first] for label, report in reports.items()}
    if len({len(line) for line in values.values()}) != 1:
        raise TplabError("the reports are not about the same prompt" if values else "there is no report to draw")
    panels = [[label] for label in values] if len(values) > 2 else [list(values)]
    across, down = min(2, len(panels)), -(-len(panels) // 2)
    figure, axes = picture(9.0, 1.7 + 2.7 * down, nrows=down, ncols=across, squeeze=False)
    every = looks(values)
    for ax, labels in zip(axes.flat, panels):
        axis = DifferenceAxis(ax, values, {dtype_name(r): r.floor for r in reports.values()})  # one scale for all
        axis.draw({label: every[label] for label in labels})
        ax.set_title(", ".join(labels) if len(panels) > 1 else "", fontsize=11)
        label_differences(ax, reports)
        ax.set_xlabel("position of the token in the prompt")
    for ax in axes.flat[len(panels):]:
        ax.set_axis_off()
    for ax in axes[:, 1:].flat:
        ax.set_ylabel("")
    details = "; ".join(f"{label}: " + _said(line, reports[label].floor) for label, line in values.items())
    return figure.finished(title or f"{point}, token by token", columns=4 * (len(panels) == 1),
                           words=f"{point}, difference from Hugging Face token by token. {details}.")


def _said(line: list[float], floor: float) -> str:
    """The first two differences along the prompt and the last."""
    sizes = ["inside the floor" if value <= floor else magnitude(value, floor=0) for value in line]
    return ", ".join(f"{sizes[at]} at position {at}" for at in (0, 1, len(line) - 1)) if len(line) > 1 else sizes[0]
