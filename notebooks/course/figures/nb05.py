"""Figures of notebook 05: continuous batching, and at which tokens a run is wrong."""

from itertools import groupby, islice

from course.figures.texts import draw_texts
from tplab.errors import TplabError
from tplab.show.figures.style import BLUE, FAINT, FLOOR, INK, ORANGE, RED, SKY, Picture, picture, styled
from tplab.show.phrases import row_distances
from tplab.show.steps import EngineSteps

KINDS = {"reads": BLUE, "reads again": ORANGE, "one token": SKY, "preempted": RED, "waits": FLOOR}  # of a step


def slices(run: EngineSteps) -> dict[int, dict[int, tuple[str, int]]]:
    """``{sequence: {step: (one of KINDS, computed tokens)}}`` over the steps in which it was there, from 1."""
    rows = {}
    for number, arrived in run.arrivals.items():
        last = max(at for at, record in enumerate(run.history, 1) if number in record.tokens)
        lost, rows[number] = False, {}
        for at, record in enumerate(run.history[arrived:last], arrived + 1):
            lost = lost or number in record.preempted
            if number in record.tokens:
                kind = "one token" if number not in record.prefill else "reads again" if lost else "reads"
            else:
                kind = "preempted" if number in record.preempted else "waits"
            rows[number][at] = kind, record.tokens.get(number, 0)
    return rows


@styled
def timeline_figure(run: EngineSteps) -> Picture:
    """A row per sequence, a column per step, the number of computed tokens in each cell; below, the blocks in use.

    Where a row ends, the sequence is finished. ``✗``: preempted.

        >>> figures.timeline_figure(show.engine_steps(llm, prompts, params, arrivals=[0, 0, 3]))
    """
    steps, rows = len(run.history), slices(run)
    figure, (ax, below) = picture(max(7.0, min(11.0, 1.2 + 0.32 * steps)), 2.2 + 0.36 * len(rows), nrows=2, sharex=True,
                                  height_ratios=[0.36 * len(rows), 0.7])
    for line, row in enumerate(rows.values()):
        for step, (kind, tokens) in row.items():
            ax.barh(line, 0.94, left=step - 0.47, height=0.8, color=KINDS[kind])
            ax.text(step, line, "✗" if kind == "preempted" else tokens or "", ha="center", va="center", fontsize=9,
                    color="white" if kind in ("reads", "preempted") else INK)
    ax.set_yticks(range(len(rows)), [f"seq {number}" for number in rows])
    ax.set(xlim=(0.4, steps + 0.6), ylim=(len(rows) - 0.5, -0.5))
    ax.tick_params(length=0)
    used = [record.used_blocks for record in run.history]
    below.bar(range(1, steps + 1), used, width=0.94, color="#c9c9c9")
    below.axhline(run.num_blocks, color=INK, lw=1, ls="--")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.set(xlabel=f"step; dashed: the pool's {run.num_blocks} blocks", ylabel="blocks\nin use", ylim=(0, None))
    for kind, color in KINDS.items():
        ax.barh(0, 0, color=color, label=kind)
    details = "; ".join(f"sequence {number}: {_describe_row(row)}" for number, row in rows.items())
    return figure.finished("What each sequence does in each step", (
        f"{steps} steps. {details}. At most {max(used)} of {run.num_blocks} blocks in use."), columns=5)


def _describe_row(row: dict[int, tuple[str, int]]) -> str:
    """``{1: ("reads", 8), 2: ("one token", 1)}`` → ``"reads 8 in step 1, one token in step 2, finished"``."""
    groups = [(kind, tokens, list(steps)) for (kind, tokens), steps in groupby(row, row.get)]
    return ", ".join(f"{kind.replace('reads', f'reads {tokens}')} in step"
                     + (f" {steps[0]}" if len(steps) == 1 else f"s {steps[0]}–{steps[-1]}")
                     for kind, tokens, steps in groups) + ", finished"


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
