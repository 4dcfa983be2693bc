"""Figures of notebook 02."""

from tplab.errors import TplabError
from tplab.shard.plan import split_evenly
from tplab.show.drawings.svg import GREY, INK, LINE, Drawing, Svg, box, colour, write

_LEFT, _ROW = 70.0, 144.0  # where the first matrix begins; the height of a rank's row
_HEADINGS = ("x, whole", "up: column parallel", "its outputs", "down: row parallel", "a summand", "", "y, whole")


def column_row_figure(tokens: int, hidden: int, inner: int, tensor_parallel_size: int) -> Drawing:
    """``y = x upᵀ downᵀ + bias`` on the ranks: which rows of up and which columns of down each holds, what it computes
    from them, and the one sum. Raises `TplabError` where ranks have nothing to hold.

        >>> figures.column_row_figure(tokens=5, hidden=32, inner=65, tensor_parallel_size=2)
    """
    if not 1 <= tensor_parallel_size <= inner:
        raise TplabError(f"{tensor_parallel_size} ranks cannot share {inner} inner features")
    parts, unit = split_evenly(inner, tensor_parallel_size), 84 / max(hidden, inner)
    wide, long, flat = max(26.0, hidden * unit), max(26.0, inner * unit), max(10.0, min(24.0, tokens * unit))
    at, widths = [_LEFT], (wide, wide, long * len(parts[0]) / inner, long, wide, 16.0, wide)
    for width in widths:
        at.append(at[-1] + max(width, 90.0) + 30)
    top, bottom = 62.0, 62.0 + _ROW * len(parts) - 18
    body = write(8, 16, "Column, then row, then one sum", size=13.5, bold=True)
    for x, heading in zip(at, _HEADINGS):
        body += write(x, 42, heading, size=11)
    for rank, part in enumerate(parts):
        body += _row(rank, part, top + _ROW * rank, at, tokens, hidden, inner, (wide, long, flat))
    body += box(at[5], top - 6, 24, bottom - top + 12, "#fff", INK, "all_reduce")
    body += write(at[5] + 12, (top + bottom) / 2, "all_reduce: the sum", size=11, anchor="middle", turned=True)
    held = "; ".join(f"rank {rank} rows {part.start}–{part.stop - 1} of up and the same columns of down, [{tokens}, "
                     f"{len(part)}] between them" for rank, part in enumerate(parts))
    return Drawing(Svg(at[6] + max(wide, 78.0) + 10, bottom + 14, body).text(), (
        f"Figure: column, then row, then one sum. x [{tokens}, {hidden}] is whole on every rank, up is [{inner}, "
        f"{hidden}], down [{hidden}, {inner}]. {held}. Each rank's summand is [{tokens}, {hidden}]; one all_reduce "
        "adds them up, and the bias is in rank 0's alone."))


def _row(rank: int, part: range, y: float, at: list[float], tokens: int, hidden: int, inner: int, sizes) -> str:
    """One rank: what goes in, the two pieces that it holds, what comes out of each, the sum."""
    (wide, long, flat), (fill, _) = sizes, colour(rank)
    here, middle = len(part), y + long / 2
    start, share = long * part.start / inner, long * here / inner

    def matrix(x, width, paint, shape, below=""):
        text = write(x, middle + flat / 2 + 11, f"[{shape}]", size=11)
        return box(x, middle - flat / 2, width, flat, paint, LINE) + text + write(x, middle + flat / 2 + 26, below,
                                                                                  size=10.5)

    body = write(8, middle, f"rank {rank}", bold=True)
    body += matrix(at[0], wide, GREY, f"{tokens}, {hidden}")
    body += box(at[1], y, wide, long, GREY, LINE, f"up [{inner}, {hidden}]")
    body += box(at[1], y + start, wide, share, fill, fill, f"rows {part.start}–{part.stop - 1}")
    body += write(at[1], y + long + 11, f"[{here}, {hidden}]", size=11)
    body += write(at[1], y + long + 26, f"rows {part.start}–{part.stop - 1}", size=10.5)
    body += matrix(at[2], share, fill, f"{tokens}, {here}")
    body += box(at[3], middle - wide / 2, long, wide, GREY, LINE, f"down [{hidden}, {inner}]")
    body += box(at[3] + start, middle - wide / 2, share, wide, fill, fill, f"columns {part.start}–{part.stop - 1}")
    body += write(at[3], middle + wide / 2 + 11, f"[{hidden}, {here}]", size=11)
    body += write(at[3], middle + wide / 2 + 26, f"columns {part.start}–{part.stop - 1}", size=10.5)
    body += matrix(at[4], wide, fill, f"{tokens}, {hidden}", "" if rank else "with the bias")
    body += matrix(at[6], wide, "#444444", f"{tokens}, {hidden}")
    ends = (at[0] + wide, at[1] + wide, at[2] + share, at[3] + long, at[4] + wide, at[5] + 24)
    for end, begin in zip(ends, at[1:]):
        body += (f'<path d="M{end + 5:g} {middle:g}H{begin - 7:g}m-5 -4l5 4l-5 4" fill="none" stroke="{INK}"/>')
    return body
