"""Notebook 13: products beside sums on a simulated clock, a ring step by step, and rows beside whole regions."""

from collections.abc import Sequence

from matplotlib.patches import FancyArrowPatch, Rectangle

from course.cost.pipeline import pipeline
from tplab.show.figures.style import BLUE, FAINT, INK, NOTHING, ORANGE, SKY, Picture, picture, styled

_RANKS = (BLUE, ORANGE, SKY)


@styled
def overlap_figure(product: float, transfer: float, latencies: Sequence[float], parts: Sequence[int], ranks: int,
                   title: str) -> Picture:
    """Products and sums as bars on a simulated clock: a column for each latency, a panel for each number of parts, a
    row for each rank. All arguments but ``parts`` and ``ranks`` are milliseconds; the ranks are equally fast.

        >>> figures.overlap_figure(4, 4, (0.1, 1), (1, 2, 4, 8), 2, "Each part adds a latency")
    """
    figure, axes = picture(9.6, 0.9 + len(parts) * (0.55 + 0.3 * ranks), nrows=len(parts), ncols=len(latencies),
                           squeeze=False, sharex=True)
    words = []
    for row, count in zip(axes, parts):
        for ax, latency in zip(row, latencies):
            steps = pipeline(product, latency, transfer - latency, count)
            for rank in range(ranks):
                for start, begin, end in steps:
                    ax.barh(rank - 0.2, product / count, left=start, height=0.38, color=BLUE, edgecolor="white")
                    ax.barh(rank + 0.2, end - begin, left=begin, height=0.38, color=ORANGE, edgecolor="white")
            ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
            ax.set_ylim(ranks - 0.4, -0.6)
            ax.axvline(steps[-1][2], color=INK, lw=1, ls="--")
            ax.set_title(f"latency {latency} ms, {count} part{'s' * (count > 1)}: {steps[-1][2]:.1f} ms", fontsize=10)
            words.append(f"latency {latency} ms, {count} part{'s' * (count > 1)}: {steps[-1][2]:.1f} ms")
    for ax in axes[-1]:
        ax.set_xlabel("ms, simulated")
    for color, label in ((BLUE, "product"), (ORANGE, "its sum over the ranks")):
        axes[0][0].barh(0, 0, color=color, label=label)
    return figure.finished(title, "products and their sums as bars on a simulated clock, a row for each rank. "
                           + "; ".join(words) + ".", columns=2)


def ring(ranks: int) -> list[list[list[frozenset]]]:
    """What the ranks hold after each message of a ring: ``[message][rank][rows of rank r]``, as the set of the ranks
    whose summands are in it. First ``ranks - 1`` messages of a reduce-scatter, then as many of an all-gather."""
    state = [[frozenset({rank}) for _ in range(ranks)] for rank in range(ranks)]
    states = [state]
    for message in range(2 * (ranks - 1)):
        state = [list(rows) for rows in state]
        for rank in range(ranks):
            rows = (rank - 1 - message) % ranks
            arrives = states[-1][rank][rows]
            receiver = (rank + 1) % ranks
            state[receiver][rows] = states[-1][receiver][rows] | arrives if message < ranks - 1 else arrives
        states.append(state)
    return states


@styled
def ring_figure(ranks: int, title: str) -> Picture:
    """A panel for the start and for each message of the ring: a column for each rank, a field for the rows of each
    rank, with the ranks whose summands are in it. Fields that have just arrived are framed; whole sums are blue.

        >>> figures.ring_figure(3, "Reduce-scatter, then all-gather")
    """
    states = ring(ranks)
    figure, axes = picture(1.2 + 1.75 * len(states), 1.3 + 0.5 * ranks, ncols=len(states), squeeze=False)
    for number, (ax, state) in enumerate(zip(axes[0], states)):
        for rank in range(ranks):
            for rows, summands in enumerate(state[rank]):
                new = number and state[rank][rows] != states[number - 1][rank][rows]
                whole = len(summands) == ranks
                ax.add_patch(Rectangle((rank + 0.06, rows + 0.1), 0.88, 0.8, facecolor=SKY if whole else NOTHING,
                                       edgecolor=INK if new else FAINT, lw=2.2 if new else 0.6))
                ax.text(rank + 0.5, rows + 0.5, "+".join(map(str, sorted(summands))), ha="center", va="center",
                        fontsize=9)
        phase = "reduce-scatter" if number < ranks else "all-gather"
        ax.set_title("start" if not number else f"{phase},\nmessage {(number - 1) % (ranks - 1) + 1}", fontsize=9.5)
        ax.set(xlim=(0, ranks), ylim=(ranks, 0))
        ax.set_xticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], fontsize=8)
        ax.set_yticks([rows + 0.5 for rows in range(ranks)],
                      [f"rows of {rows}" for rows in range(ranks)] if not number else [], fontsize=8)
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)
    after = ["+".join(map(str, sorted(states[ranks - 1][rank][rank]))) for rank in range(ranks)]
    return figure.finished(title, (
        f"a ring of {ranks} ranks, message by message; in each field the ranks whose summands are in it. After "
        f"{ranks - 1} messages rank r holds the whole sum of its own rows ({after[0]}), after {2 * (ranks - 1)} every "
        "rank holds all rows."))


_STAGES = ("residual", "norm", "attention", "residual", "norm", "MLP", "residual")


@styled
def regions_figure(sizes: Sequence[int], title: str) -> Picture:
    """A layer from left to right, plain and by rows: which rows of the tokens each rank holds at each stage.

    ``sizes``: how many rows each rank keeps.

        >>> figures.regions_figure([2, 2], "Between the collectives a rank needs only its own rows")
    """
    figure, axes = picture(9.6, 1.6 + 0.85 * 2 * len(sizes), nrows=2)
    total, wide = sum(sizes), len(_STAGES)
    for ax, way in zip(axes, ("plain", "by rows")):
        for rank, size in enumerate(sizes):
            for stage, name in enumerate(_STAGES):
                whole = way == "plain" or name in ("attention", "MLP")
                first, count = (0, total) if whole else (sum(sizes[:rank]), size)
                top = rank + 0.1
                ax.add_patch(Rectangle((stage + 0.14, top), 0.72, 0.8, facecolor=NOTHING, edgecolor=FAINT, lw=0.6))
                ax.add_patch(Rectangle((stage + 0.14, top + 0.8 * first / total), 0.72, 0.8 * count / total,
                                       facecolor=_RANKS[rank % 3], alpha=0.75))
        for stage in (2, 5):
            for x, name in (((stage + 1, "all-reduce"),) if way == "plain" else (
                    (stage, "all-gather"), (stage + 1, "reduce-scatter"))):
                ax.add_patch(FancyArrowPatch((x, -0.25), (x, len(sizes) + 0.05), arrowstyle="-", color=INK, lw=1.6))
                ax.text(x, -0.3, name, ha="center", va="bottom", fontsize=9)
        ax.set(xlim=(0, wide), ylim=(len(sizes) + 0.05, -0.75))
        ax.set_xticks([stage + 0.5 for stage in range(wide)], _STAGES, fontsize=9)
        ax.set_yticks([rank + 0.5 for rank in range(len(sizes))], [f"rank {rank}" for rank in range(len(sizes))])
        ax.set_ylabel(way)
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)
    return figure.finished(title, (
        "one layer from left to right on each rank, plain and by rows. Plain: every rank holds the rows of all tokens "
        f"at every stage, with an all-reduce after attention and after the MLP. By rows: a rank holds its own rows "
        f"({', '.join(map(str, sizes))} of {total}) for residuals and norms, and all rows inside attention and MLP; an "
        "all-gather stands before each of the two and a reduce-scatter after it."))
