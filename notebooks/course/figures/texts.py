"""Texts token by token, below each other: a token can have a colour of its own."""

from collections.abc import Mapping, Sequence

from tplab.show.figures.style import INK, Picture, picture

_WIDE, _SIZE = 110, 10  # characters of a line, points of a character


def draw_texts(texts: Mapping[str, Sequence[tuple[str, str]]]) -> Picture:
    """``{label: [(token, colour)]}`` on as many lines as it takes; what is not in ``INK`` is bold. Without a title.

    For a function that is ``styled``.
    """
    places, y = [], 0.0
    for label, tokens in texts.items():
        places.append((0, y, f"{label}:", INK, "bold"))
        x, y = 0, y + 1
        for token, color in tokens:
            shown = token.replace("\n", "⏎")
            if x + len(shown) > _WIDE:
                x, y = 0, y + 1
            places.append((x, y, shown, color, "normal" if color == INK else "bold"))
            x += len(shown)
        y += 1.6
    high = 0.5 + 0.2 * y
    figure, ax = picture(_WIDE * 0.602 * _SIZE / 72, high)  # as wide as so many characters of this font
    figure.set_layout_engine("none")
    ax.set_position((0.01, 0, 0.99, (high - 0.4) / high))
    for x, y_, text, color, weight in places:
        ax.text(x, y_, text, color=color, family="DejaVu Sans Mono", fontsize=_SIZE, va="top", fontweight=weight)
    ax.set(xlim=(0, _WIDE), ylim=(y, -0.2))
    ax.axis("off")
    return figure
