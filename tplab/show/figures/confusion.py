"""Which name the diagnosis gave to which fault, as a matrix."""

from matplotlib.patches import Rectangle

from tplab.show.figures.style import BLUE, FAINT, RED, Picture, picture, styled

HEALTHY, NAMELESS = "(healthy)", "(no name)"


@styled
def confusion_figure(score) -> Picture:
    """Rows: what was wrong with the engine; columns: what the diagnosis said; how often, on the diagonal in blue.

    ``score``: what :func:`tplab.faults.score.score` returned. Off the diagonal, a mistake is red; a
    pair that the numbers cannot distinguish is grey.

        >>> show.confusion_figure(score(["fable"]))
    """
    from tplab.faults.score import HEALTHY as INNOCENT
    from tplab.faults.score import LOOKALIKE

    counts, alike = {}, set()
    for run in score.runs:
        for said in run.said or ("",):
            row = run.fault or HEALTHY
            fine = said in run.true or run.outcome == INNOCENT
            pair = row, row if fine else {"": HEALTHY, "?": NAMELESS}.get(said, said)
            counts[pair] = counts.get(pair, 0) + 1
            if run.outcome == LOOKALIKE:
                alike.add(pair)
    rows = list(dict.fromkeys(row for row, _ in counts))
    columns = rows + [column for column in dict.fromkeys(column for _, column in counts) if column not in rows]
    figure, axes = picture(2.6 + 0.26 * len(columns), 2.6 + 0.22 * len(rows))
    for (row, column), count in counts.items():
        colour = BLUE if row == column else FAINT if (row, column) in alike else RED
        at = columns.index(column), rows.index(row)
        axes.add_patch(Rectangle((at[0] - 0.46, at[1] - 0.46), 0.92, 0.92, color=colour))
        axes.text(*at, str(count), color="white", fontsize=7, ha="center", va="center")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set(xlim=(-0.6, len(columns) - 0.4), ylim=(len(rows) - 0.4, -0.6), xlabel="what the diagnosis said",
             ylabel="what was wrong")
    axes.tick_params(length=0)
    off = "; ".join(f"{row} as {column} {count} times" for (row, column), count in counts.items() if row != column)
    return figure.finished("Every fault gets its name" if score.ok else "Red: another fault's name", (
        f"{len(rows)} kinds of engines and what the diagnosis said of each. Off the diagonal: "
        f"{off or 'nothing'}."))
