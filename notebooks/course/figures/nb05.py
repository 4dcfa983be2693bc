"""Figures of notebook 05: continuous batching, and at which tokens a run is wrong."""

from html import escape
from itertools import groupby, islice
from typing import NamedTuple

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tplab.errors import TplabError
from tplab.show.drawings.blocks import blocks_figure, short, tint
from tplab.show.drawings.svg import LINE, Drawing, Svg, box, cell, colour, write
from tplab.show.figures.style import FAINT, INK, RED, Picture, picture, show_with_words, styled
from tplab.show.phrases import row_distances
from tplab.show.steps import EngineSteps

WRONG, RIGHT, FOUND, HIGH, WIDE = "#f3b98f", "#d9f0e8", "#ffffff", 30.0, 940.0


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


def token_grid_figure(report, tokenizer, point: str | None = None) -> Drawing:
    """Each prompt token by token, as far as it was computed: off the floor at a trace point, or found in the cache?

    A bar marks where decoding begins. ``report``: of :func:`tplab.align.align_decode`. ``point``: a trace point with a
    row per token; the first divergent one if not given, the final norm of a run without any.

        >>> figures.token_grid_figure(align_decode(ckpt, prompts, patches=[fault]), ckpt.tokenizer())
    """
    if report.decode is None:
        raise TplabError("token_grid_figure takes a report of align_decode")
    first = report.first_divergence
    point = point or ("norm" if first is None or first.name == "logits" else first.name)
    outside = (not distance <= report.floor for distance in row_distances(report, point))
    decoding = {s.request_id: s.segment.prompt_length for step in report.decode.steps for s in step.requests}
    body, y, details = write(8, 12, f"at {point}", bold=True), 30.0, []
    hits = any(computed[0] for computed in report.computed)
    body += _legend(40 + 8 * len(point), hits)
    for number, (ids, computed) in enumerate(zip(report.ids, report.computed)):
        wrong = dict(zip(computed, islice(outside, len(computed))))
        texts = [tokenizer.decode([token]) for token in ids[:computed[-1] + 1]]  # the last token is never computed
        body += write(8, y + 11, f"prompt {number}", bold=True)
        x = 78.0
        for position, text in enumerate(texts):
            wide = 9 + 6.9 * len(short(text, 12))
            if x + wide > WIDE:
                x, y = 78.0, y + HIGH + 8
            fill = WRONG if wrong.get(position) else FOUND if position not in wrong else RIGHT
            if position == decoding[number]:
                body += box(x, y - 4, 3, HIGH + 2, "#222", "#222")
                x += 7
            body += cell(x, y, wide, 21, fill, short(text, 12), stroke=LINE, size=11,
                         ink="#222" if position in wrong else "#8a8a8a")
            if wrong.get(position):
                body += box(x, y + 21, wide, 3, "#D55E00", "#D55E00")
            x += wide + 3
        y += HIGH + 14
        bad = [position for position in computed if wrong[position]]
        found = len(texts) - len(computed)
        details.append(f"prompt {number}: "
                    + (f"first wrong at position {bad[0]} ({texts[bad[0]]!r})" if bad else "all right")
                    + (f", {found} tokens found in the cache" if found else ""))
    return Drawing(Svg(WIDE + 10, y, body).text(), f"Figure: the tokens at {point}. {'; '.join(details)}.")


def _legend(x: float, hits: bool) -> str:
    body, kinds = "", [(RIGHT, "as Hugging Face"), (WRONG, "off the floor"),
                       (FOUND, "not computed: found in the cache")]
    for fill, label in kinds[:2 + hits]:
        body += box(x, 4, 18, 14, fill, LINE) + write(x + 24, 12, label, size=11)
        body += box(x, 18, 18, 3, "#D55E00", "#D55E00") if fill == WRONG else ""
        x += 44 + 6.4 * len(label)
    return body + box(x, 3, 3, 18, "#222", "#222") + write(x + 9, 12, "decoding begins", size=11)


class Stepper:
    """The number of a step of a run, and buttons for the next one and the one before; without a kernel its first
    picture.

    No slider: ipywidgets 8 gives a slider's handle no accessible name, and has no trait to set one.
    """

    def __init__(self, run: EngineSteps, step: int):
        import ipywidgets as widgets

        self._run, self._first = run, blocks_figure(run, [step])
        back, onward = (widgets.Button(description=text, icon=icon, layout=widgets.Layout(width="6em"))
                        for text, icon in (("Back", "step-backward"), ("Next", "step-forward")))
        self.step = widgets.BoundedIntText(value=step, min=1, max=len(run.moments), description="step",
                                           layout=widgets.Layout(width="11em"))
        back.on_click(lambda _: self.go(-1))
        onward.on_click(lambda _: self.go(1))
        self.picture = widgets.HTML(self._drawn(self._first))
        self.step.observe(self._redraw, "value")
        self.widget = widgets.VBox([widgets.HBox([self.step, back, onward]), self.picture])
        self.alt_text = self._first.alt_text.replace("Figure:", "Figure: the steps when this cell ran.", 1)

    def go(self, steps: int) -> None:
        """Go so many steps on, or back if negative, and not beyond the ends."""
        self.step.value += steps  # the widget keeps it within its ends

    def _redraw(self, change) -> None:
        self.picture.value = self._drawn(blocks_figure(self._run, [change["new"]]))

    @staticmethod
    def _drawn(drawing: Drawing) -> str:
        """The picture with its own words below it, which follow the step."""
        return f'{drawing.html()}<div style="line-height: 1.4">{escape(drawing.alt_text)}</div>'

    def __str__(self) -> str:
        return f"Steps 1 to {len(self._run.moments)}; shown: step {self.step.value}."

    def _ipython_display_(self):
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        show_with_words(self, {"text/plain": str(self), "text/html": self._first.html(),
                               "application/vnd.jupyter.widget-view+json": view})


def block_stepper(run: EngineSteps, step: int = 1) -> Stepper:
    """All steps, one at a time, at first ``step``: block tables and pool.

        >>> figures.block_stepper(show.engine_steps(llm, prompts))
    """
    run.moment(step)
    return Stepper(run, step)
