"""SVG as text: colours, boxes, lines of text, and a picture that shows itself in a notebook."""

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from tplab.show.figures.style import image_html, show_with_words

# Okabe and Ito's colours, which most colour-blind people can tell apart, each with the ink that is readable on it.
COLOURS = (("#0072B2", "#fff"), ("#E69F00", "#000"), ("#009E73", "#fff"), ("#CC79A7", "#000"),
           ("#56B4E9", "#000"), ("#D55E00", "#fff"), ("#F0E442", "#000"), ("#444444", "#fff"))
GREY, LINE, INK = "#f2f2f2", "#b8b8b8", "#222"
LIMIT, GAP = 960.0, 26.0  # pixels: the width of drawings side by side, and the gap between them


def colour(rank: int) -> tuple[str, str]:
    """Fill and ink of a rank; they repeat after eight ranks, the numbers do not."""
    return COLOURS[rank % len(COLOURS)]


class Svg(NamedTuple):
    """A drawing that can be placed in another one."""

    width: float
    height: float
    body: str

    def text(self) -> str:
        """A whole SVG document, on white, so that it can be read on a dark page too."""
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
                f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="DejaVu Sans, Verdana, sans-serif" '
                f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>{self.body}</svg>')

    def at(self, x: float, y: float) -> str:
        """The drawing, moved."""
        return f'<g transform="translate({x:g} {y:g})">{self.body}</g>'


def write(x: float, y: float, text: str, *, size: float = 12, anchor: str = "start", ink: str = INK, bold: bool = False,
          turned: bool = False) -> str:
    """A line of text; ``y`` is its middle."""
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    weight = ' font-weight="bold"' if bold else ""
    return (f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" dominant-baseline="central" '
            f'fill="{ink}"{weight}{turn}>{escape(text)}</text>')


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "#fff") -> str:
    """A rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'


def cell(x: float, y: float, width: float, height: float, fill: str, text: str, *, stroke: str = "#fff", **look) -> str:
    """A rectangle with a text in its middle; ``look`` is that of :func:`write`."""
    return (box(x, y, width, height, fill, stroke)
            + write(x + width / 2, y + height / 2, text, anchor="middle", **look))


def beside(drawings: Sequence[Svg]) -> Svg:
    """Drawings next to each other, in as many rows as keep within a notebook's width."""
    body, x, y, row, width = "", 0.0, 0.0, 0.0, 0.0
    for drawing in drawings:
        if x and x + drawing.width > LIMIT:
            x, y, row = 0.0, y + row + GAP, 0.0
        body += drawing.at(x, y)
        width, row, x = max(width, x + drawing.width), max(row, drawing.height), x + drawing.width + GAP
    return Svg(width, y + row, body)


class Drawing:
    """An SVG picture that shows itself in a notebook together with its text alternative (the line ``Figure: …``)."""

    def __init__(self, svg: str, alt_text: str):
        self.svg, self.alt_text = svg, alt_text

    def _ipython_display_(self):
        show_with_words(self, {"text/html": self.html()})

    def html(self) -> str:
        """The picture with its words, for a page."""
        return image_html(self.svg.encode(), self.alt_text, "image/svg+xml")
