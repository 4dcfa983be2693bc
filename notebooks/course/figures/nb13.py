"""Notebook 13: products beside sums on a simulated clock, and a ring step by step."""

from collections.abc import Sequence

from course.cost.pipeline import pipeline
from tplab.show.figures.style import BLUE, INK, ORANGE, Picture, picture, styled


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


def ring_rows(ranks: int) -> list[dict[str, str]]:
    """A ring of so many ranks, message by message, as rows of a table: for the rows of each rank in turn, the ranks
    whose summands are in what a rank holds of them.

        >>> show.table(figures.ring_rows(3), index="after")
    """
    phases = ["the start", *(f"{phase} {message}" for phase in ("reduce-scatter", "all-gather")
                             for message in range(1, ranks))]
    return [{"after": phase, **{f"rank {rank}": " | ".join("+".join(map(str, sorted(summands))) for summands in rows)
                                for rank, rows in enumerate(state)}} for phase, state in zip(phases, ring(ranks))]


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
