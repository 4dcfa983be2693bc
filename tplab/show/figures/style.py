"""How the lab's figures look: a colour and a marker for each stage of the series, a figure with a text alternative.

The colours are Okabe and Ito's, which people with the common kinds of colour blindness can tell apart.
"""

from base64 import b64encode
from collections.abc import Iterable
from html import escape
from io import BytesIO
from textwrap import fill
from typing import NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tplab.errors import TplabError
from tplab.show.phrases import in_width

INK, FAINT, FLOOR, NOTHING = "#222222", "#8a8a8a", "#e4e4e4", "#f6f6f6"
BLUE, SKY, GREEN, ORANGE, RED, PINK, BLACK = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#000000")

RC = {"font.family": "DejaVu Sans", "font.size": 11, "axes.titlesize": 12.5, "axes.titleweight": "bold",
      "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT,
      "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "legend.frameon": False,
      "legend.fontsize": 10.5, "figure.facecolor": "white", "savefig.facecolor": "white", "hatch.linewidth": 0.6,
      "grid.color": "#dddddd", "grid.linewidth": 0.6}
styled = matplotlib.rc_context(RC)  # decorates a function that draws


class Look(NamedTuple):
    """The colour and the marker of one line."""

    color: str
    marker: str


# The stages of the series: what a line means by its colour and marker in one notebook, it means in all of them.
STAGES = {"seed engine": Look(RED, "X"), "after 01": Look(ORANGE, "v"), "after 02": Look(PINK, "s"),
          "after 03": Look(SKY, "D"), "after 04": Look(BLUE, "^"), "after 05": Look(BLACK, "P"),
          "finished": Look(GREEN, "o")}
_ROLES = {"broken": STAGES["seed engine"], "fixed": STAGES["finished"], "right": STAGES["finished"]}


def looks(labels: Iterable[str], good: Iterable[bool] = ()) -> dict[str, Look]:
    """A look for every label: stages and ``"broken"``/``"fixed"`` keep theirs, other labels take what is left.

    ``good``, per label: whether it is inside the floor; where that is known, another label looks broken or fixed too,
    as long as nothing else does.
    """
    labels = list(labels)
    known = {label: STAGES.get(label) or _ROLES[label] for label in labels if label in STAGES or label in _ROLES}
    for label, inside in zip(labels, good):
        role = _ROLES["fixed" if inside else "broken"]
        if label not in known and role not in known.values():
            known[label] = role
    order = ("after 04", "after 01", "after 02", "after 05", "after 03", "seed engine", "finished")
    spare = iter([STAGES[stage] for stage in order if STAGES[stage] not in known.values()])
    chosen = {label: known.get(label) or next(spare, None) for label in labels}
    if None in chosen.values():
        raise TplabError(f"a figure can tell {len(STAGES)} lines apart, not {len(labels)}")
    return chosen


class Picture(Figure):
    """A matplotlib figure that shows itself in a notebook with its text alternative, the line ``Figure: …``, below."""

    def __init__(self, width: float, height: float):
        super().__init__(figsize=(width, height), dpi=110, layout="constrained")
        FigureCanvasAgg(self)
        self.alt_text = ""

    def finished(self, title: str, words: str, columns: int = 0) -> "Picture":
        """Itself, with a title in as many lines as it takes, a text alternative, and a legend in so many columns,
        or as many as there is room for."""
        self.suptitle(fill(title, round(9 * self.get_figwidth())), x=0.01, ha="left", fontweight="bold", fontsize=12.5)
        for fewer in range(columns, 0, -1):
            legend = self.legend(loc="outside lower left", ncols=fewer)
            if fewer == 1 or legend.get_window_extent().width <= self.bbox.width:
                break
            legend.remove()
        self.alt_text = f"Figure: {words}"
        return self

    @styled
    def png(self) -> bytes:
        """The picture as a PNG file's bytes."""
        buffer = BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()

    def _ipython_display_(self):
        show_with_words(self, {"image/png": self.png()})


def show_with_words(shown, data: dict) -> None:
    """Put ``data`` ({mime type: content}) into the cell's output and print the text alternative below it."""
    from IPython.display import display

    data = {mime: b64encode(content).decode() if isinstance(content, bytes) else content
            for mime, content in data.items()}
    words = shown.alt_text.removeprefix("Figure: ")
    display({"text/plain": f"<{type(shown).__name__}>", **data}, raw=True, metadata={"image/png": {"alt": words}})
    print(in_width(shown.alt_text))


def image_html(content: bytes, words: str, mime: str = "image/png") -> str:
    """An ``<img>`` with its text alternative that JupyterLab shows in a notebook it does not trust, too.

    There it drops ``image/svg+xml``, ``<style>`` and an image's metadata. As wide as the page at most.
    """
    return (f'<img alt="{escape(words.removeprefix("Figure: "))}" style="max-width: 100%; height: auto" '
            f'src="data:{mime};base64,{b64encode(content).decode()}">')


def picture(width: float = 9.0, height: float = 4.3, **grid):
    """A :class:`Picture` and its axes, for a function that is ``styled``. ``grid``: as ``Figure.subplots`` takes it."""
    figure = Picture(width, height)
    return figure, figure.subplots(**grid)
