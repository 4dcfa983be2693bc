"""Continuous batching drawn: which sequence computes how many tokens in which step, and how full the cache is."""

from itertools import groupby
from typing import NamedTuple

from tplab.show.drawings.blocks import MARK, tint
from tplab.show.drawings.svg import LINE, Drawing, Svg, box, cell, colour, write
from tplab.show.recording import StepRecording

LEFT, TOP, ROW, BARS = 62.0, 44.0, 30.0, 58.0


class Slice(NamedTuple):
    """What one sequence did in one step."""

    kind: str  # "prefill", "again" (reading after a preemption), "decode", "preempted" or "waiting"
    tokens: int  # how many it computed
    last: bool  # whether it finished with this step


def slices(recording: StepRecording) -> dict[int, dict[int, Slice]]:
    """``{sequence: {step: Slice}}`` over the steps in which it was there; steps count from 1 within the recording."""
    found = {}
    for number, arrived in recording.arrivals.items():
        steps = [at for at, record in enumerate(recording.history, 1) if number in record.tokens]
        lost, rows = False, {}
        for at, record in enumerate(recording.history[arrived:steps[-1]], arrived + 1):
            lost = lost or number in record.preempted
            if number in record.tokens:
                kind = ("again" if lost else "prefill") if number in record.prefill else "decode"
            else:
                kind = "preempted" if number in record.preempted else "waiting"
            rows[at] = Slice(kind, record.tokens.get(number, 0), at == steps[-1])
        found[number] = rows
    return found


def timeline_figure(recording: StepRecording) -> Drawing:
    """A row per sequence, a column per step, the number of computed tokens in each cell; below, the blocks in use.

    Full colour: reading the prompt (striped: again, after a preemption). Light colour: one new token. ``✗``: preempted.
    A thin line: waiting. A black bar: finished.

        >>> figures.timeline_figure(show.record(llm, prompts, params, arrivals=[0, 0, 3]))
    """
    steps, rows = len(recording.history), slices(recording)
    wide = max(13.0, min(34.0, 830 / steps))
    right, foot = LEFT + steps * wide, TOP + ROW * len(rows) + 22
    body = ('<defs><pattern id="again" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="2" height="6" fill="#fff"/></pattern></defs>')
    body += _legend()
    for step in range(1, steps + 1):
        if wide >= 20 or step == 1 or step % 5 == 0:
            body += write(LEFT + (step - 0.5) * wide, TOP - 8, str(step), size=10, anchor="middle")
    body += write(8, TOP - 8, "step", size=10)
    for line, (number, row) in enumerate(rows.items()):
        y = TOP + line * ROW
        body += write(8, y + 13, f"seq {number}", bold=True)
        for step, part in row.items():
            body += _slice(LEFT + (step - 1) * wide, y, wide, number, part)
    body += _bars(recording, wide, foot)
    details = "; ".join(f"sequence {number}: {_describe_row(row)}" for number, row in rows.items())
    most = max(record.used_blocks for record in recording.history)
    return Drawing(Svg(max(right + 20, 700), foot + BARS + 26, body).text(),
                   f"Figure: {steps} steps. {details}. At most {most} of {recording.num_blocks} blocks in use.")


def _mark(kind: str, x: float, y: float, wide: float, high: float, full: str, light: str) -> str:
    """What a kind of step looks like, without its number."""
    if kind == "waiting":
        return f'<path d="M{x:g} {y + high / 2:g} h{wide:g}" stroke="{LINE}" stroke-width="2"/>'
    if kind == "preempted":
        return cell(x, y, wide, high, "#fff", "✗", stroke=MARK, ink=MARK, bold=True, size=min(12, high - 5))
    if kind == "again":
        return (box(x, y, wide, high, full) + f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" '
                'fill="url(#again)" opacity="0.55"/>')
    return box(x, y, wide, high, light if kind == "decode" else full)


def _slice(x: float, y: float, wide: float, number: int, part: Slice) -> str:
    fill, ink = colour(number)
    body, reading = _mark(part.kind, x, y, wide, 26, fill, tint(number)), part.kind != "decode"
    if not part.tokens:
        return body
    if part.kind == "again" and wide >= 18:
        body += box(x + 3, y + 6, wide - 6, 14, fill, fill)
    body += write(x + wide / 2, y + 13, str(part.tokens), size=11 if wide >= 18 else 9, anchor="middle",
                  ink=ink if reading else "#222", bold=reading)
    return body + (box(x + wide - 4, y, 4, 26, "#000", "#000") if part.last else "")


def _legend() -> str:
    body, x = "", 8.0
    for kind, label in {"prefill": "reads its prompt", "again": "reads again", "decode": "one new token",
                        "preempted": "preempted", "waiting": "waits", "last": "finished"}.items():
        body += (box(x + 7, 4, 4, 16, "#000", "#000") if kind == "last"
                 else _mark(kind, x, 4, 18, 16, "#555555", "#d5d5d5"))
        body += write(x + 24, 12, label, size=11)
        x += 46 + 6.6 * len(label)
    return body


def _bars(recording: StepRecording, wide: float, foot: float) -> str:
    """Blocks in use per step, the size of the pool as a line."""
    top, width = foot + 14, len(recording.history) * wide
    body = write(8, top + BARS / 2, "blocks", size=10.5) + write(8, top + BARS / 2 + 13, "in use", size=10.5)
    for step, record in enumerate(recording.history):
        high = BARS * record.used_blocks / recording.num_blocks
        body += box(LEFT + step * wide, top + BARS - high, wide, high, "#c9c9c9")
        if wide >= 18:
            body += write(LEFT + (step + 0.5) * wide, top + BARS - 8, str(record.used_blocks), size=10, anchor="middle")
    body += f'<path d="M{LEFT:g} {top:g} h{width:g}" stroke="#222" stroke-width="1" stroke-dasharray="4 3"/>'
    return body + write(LEFT, top - 9, f"the pool has {recording.num_blocks} blocks", size=10.5)


def _describe_row(row: dict[int, Slice]) -> str:
    """``{1: prefill 8, 2: decode 1, 3: decode 1}`` → ``"reads 8 in step 1, one token a step in 2–3, finished"``."""
    what = {"prefill": "reads {} in", "again": "reads {} again in", "decode": "one token in",
            "preempted": "preempted in", "waiting": "waits in"}
    groups = [(words, list(steps)) for words, steps
              in groupby(row, lambda step: what[row[step].kind].format(row[step].tokens))]
    return ", ".join(f"{words} step {steps[0]}" if len(steps) == 1 else f"{words} steps {steps[0]}–{steps[-1]}"
                     for words, steps in groups) + ", finished"
