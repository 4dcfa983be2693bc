"""Figures of notebook 05: continuous batching, and at which tokens a run is wrong."""

from itertools import groupby, islice
from typing import NamedTuple

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course.figures.texts import draw_texts
from tplab.errors import TplabError
from tplab.show.drawings.blocks import tint
from tplab.show.drawings.svg import colour
from tplab.show.figures.style import BLUE, FAINT, INK, RED, Picture, picture, styled
from tplab.show.phrases import row_distances
from tplab.show.steps import EngineSteps


class Slice(NamedTuple):
    """What one sequence did in one step."""

    kind: str  # "prefill", "again" (reading after a preemption), "decode", "preempted" or "waiting"
    tokens: int  # how many it computed
    last: bool  # whether it finished with this step


def slices(run: EngineSteps) -> dict[int, dict[int, Slice]]:
    """``{sequence: {step: Slice}}`` over the steps in which it was there; steps count from 1 within the run."""
    found = {}
    for number, arrived in run.arrivals.items():
        steps = [at for at, record in enumerate(run.history, 1) if number in record.tokens]
        lost, rows = False, {}
        for at, record in enumerate(run.history[arrived:steps[-1]], arrived + 1):
            lost = lost or number in record.preempted
            if number in record.tokens:
                kind = ("again" if lost else "prefill") if number in record.prefill else "decode"
            else:
                kind = "preempted" if number in record.preempted else "waiting"
            rows[at] = Slice(kind, record.tokens.get(number, 0), at == steps[-1])
        found[number] = rows
    return found


@styled
def timeline_figure(run: EngineSteps, title: str | None = None) -> Picture:
    """A row per sequence, a column per step, the number of computed tokens in each cell; below, the blocks in use.

    Full colour: reading the prompt (hatched: again, after a preemption). Light colour: one new token. ``✗``: preempted.
    A thin line: waiting. A black bar: finished.

        >>> figures.timeline_figure(show.engine_steps(llm, prompts, params, arrivals=[0, 0, 3]))
    """
    steps, rows = len(run.history), slices(run)
    figure, (ax, below) = picture(max(7.0, min(11.0, 1.2 + 0.32 * steps)), 2.2 + 0.36 * len(rows), nrows=2, sharex=True,
                                  height_ratios=[0.36 * len(rows), 0.7])
    for line, (number, row) in enumerate(rows.items()):
        for step, part in row.items():
            _draw_slice(ax, step, line, number, part)
    ax.set_yticks(range(len(rows)), [f"seq {number}" for number in rows])
    ax.set(xlim=(0.4, steps + 0.6), ylim=(len(rows) - 0.5, -0.5))
    ax.tick_params(length=0)
    used = [record.used_blocks for record in run.history]
    below.bar(range(1, steps + 1), used, width=0.96, color="#c9c9c9")
    below.axhline(run.num_blocks, color=INK, lw=1, ls="--")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.set(xlabel=f"step; dashed: the pool's {run.num_blocks} blocks", ylabel="blocks\nin use", ylim=(0, None))
    look = {"facecolor": "#555555", "edgecolor": "white"}
    figure.legend(handles=[
        Patch(**look, label="reads its prompt"), Patch(**look, hatch="////", label="reads it again"),
        Patch(facecolor="#d5d5d5", label="one new token"),
        Line2D([], [], color=RED, marker="X", lw=0, label="preempted"), Line2D([], [], color=FAINT, label="waits"),
        Patch(facecolor="black", label="finished")], loc="outside lower left", ncols=3, fontsize=9.5)
    details = "; ".join(f"sequence {number}: {_describe_row(row)}" for number, row in rows.items())
    return figure.finished(title or "What each sequence does in each step", (
        f"{steps} steps. {details}. At most {max(used)} of {run.num_blocks} blocks in use."))


def _draw_slice(ax, step: int, line: int, number: int, part: Slice) -> None:
    fill, ink = colour(number)
    if part.kind == "waiting":
        ax.plot([step - 0.5, step + 0.5], [line, line], color=FAINT, lw=1.5)
    elif part.kind == "preempted":
        ax.plot(step, line, color=RED, marker="X", ms=9)
    else:
        reads = part.kind != "decode"
        ax.barh(line, 0.96, left=step - 0.48, height=0.8, color=fill if reads else tint(number), edgecolor="white",
                hatch="////" if part.kind == "again" else None, lw=0)
        ax.text(step, line, str(part.tokens), ha="center", va="center", fontsize=9, color=ink if reads else INK,
                fontweight="bold" if reads else "normal",
                bbox={"facecolor": fill, "edgecolor": "none", "pad": 1} if part.kind == "again" else None)
    if part.last:
        ax.barh(line, 0.12, left=step + 0.38, height=0.8, color="black")


def _describe_row(row: dict[int, Slice]) -> str:
    """``{1: prefill 8, 2: decode 1, 3: decode 1}`` → ``"reads 8 in step 1, one token a step in 2–3, finished"``."""
    what = {"prefill": "reads {} in", "again": "reads {} again in", "decode": "one token in",
            "preempted": "preempted in", "waiting": "waits in"}
    groups = [(words, list(steps)) for words, steps
              in groupby(row, lambda step: what[row[step].kind].format(row[step].tokens))]
    return ", ".join(f"{words} step {steps[0]}" if len(steps) == 1 else f"{words} steps {steps[0]}–{steps[-1]}"
                     for words, steps in groups) + ", finished"


@styled
def token_grid_figure(report, tokenizer, point: str | None = None) -> Picture:
    """Each prompt token by token, as far as it was computed: off the floor at a trace point, or found in the cache?

    A ``│`` stands where decoding begins. ``report``: of :func:`tplab.align.align_decode`. ``point``: a trace point with
    a row per token; the first divergent one if not given, the final norm of a run without any.

        >>> figures.token_grid_figure(align_decode(ckpt, prompts, patches=[fault]), ckpt.tokenizer())
    """
    if report.decode is None:
        raise TplabError("token_grid_figure takes a report of align_decode")
    first = report.first_divergence
    point = point or ("norm" if first is None or first.name == "logits" else first.name)
    outside = (not distance <= report.floor for distance in row_distances(report, point))
    decoding = {s.request_id: s.segment.prompt_length for step in report.decode.steps for s in step.requests}
    drawn, details = {}, []
    for number, (ids, computed) in enumerate(zip(report.ids, report.computed)):
        wrong = dict(zip(computed, islice(outside, len(computed))))
        texts = [tokenizer.decode([token]) for token in ids[:computed[-1] + 1]]  # the last token is never computed
        colours = [FAINT if at not in wrong else RED if wrong[at] else INK for at in range(len(texts))]
        drawn[f"prompt {number}"] = [*zip(texts, colours)]
        drawn[f"prompt {number}"].insert(decoding[number], (" │", BLUE))
        bad = [position for position in computed if wrong[position]]
        from_cache = len(texts) - len(computed)
        details.append(f"prompt {number}: "
                       + (f"first wrong at position {bad[0]} ({texts[bad[0]]!r})" if bad else "all right")
                       + (f", {from_cache} tokens found in the cache" if from_cache else ""))
    cached = ", grey from the cache" * any(computed[0] for computed in report.computed)
    return draw_texts(drawn).finished(f"{point}: orange off the floor{cached}; decoding begins at │",
                                      f"the tokens at {point}. {'; '.join(details)}.")
