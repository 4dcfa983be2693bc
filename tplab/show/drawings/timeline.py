"""Continuous batching drawn: which sequence computes how many tokens in which step, and how full the cache is."""

from typing import NamedTuple

from tplab.show.drawings.blocks import LINE, MARK, tint
from tplab.show.drawings.svg import Drawing, Svg, box, colour, write
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

        >>> show.timeline_figure(show.record(llm, prompts, params, arrivals=[0, 0, 3]))
    """
    steps, rows = len(recording.history), slices(recording)
    cell = max(13.0, min(34.0, 830 / steps))
    right, foot = LEFT + steps * cell, TOP + ROW * len(rows) + 22
    body = ('<defs><pattern id="again" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="2" height="6" fill="#fff"/></pattern></defs>')
    body += _legend()
    for step in range(1, steps + 1):
        if cell >= 20 or step == 1 or step % 5 == 0:
            body += write(LEFT + (step - 0.5) * cell, TOP - 8, str(step), size=10, anchor="middle")
    body += write(8, TOP - 8, "step", size=10)
    for line, (number, row) in enumerate(rows.items()):
        y = TOP + line * ROW
        body += write(8, y + 13, f"seq {number}", bold=True)
        for step, part in row.items():
            body += _cell(LEFT + (step - 1) * cell, y, cell, number, part)
    body += _bars(recording, cell, foot)
    details = "; ".join(f"sequence {number}: {_describe_row(row)}" for number, row in rows.items())
    most = max(record.used_blocks for record in recording.history)
    return Drawing(Svg(max(right + 20, 700), foot + BARS + 26, body).text(),
                   f"Figure: {steps} steps. {details}. At most {most} of {recording.num_blocks} blocks in use.")


def _cell(x: float, y: float, cell: float, number: int, part: Slice) -> str:
    fill, ink = colour(number)
    if part.kind == "waiting":
        return f'<path d="M{x:g} {y + 13:g} h{cell:g}" stroke="{LINE}" stroke-width="2"/>'
    if part.kind == "preempted":
        return box(x, y, cell, 26, "#fff", MARK) + write(x + cell / 2, y + 13, "✗", anchor="middle", ink=MARK,
                                                         bold=True)
    reading = part.kind != "decode"
    body = box(x, y, cell, 26, fill if reading else tint(number))
    if part.kind == "again":
        body += f'<rect x="{x:g}" y="{y:g}" width="{cell:g}" height="26" fill="url(#again)" opacity="0.55"/>'
        if cell >= 18:
            body += box(x + 3, y + 6, cell - 6, 14, fill, fill)
    body += write(x + cell / 2, y + 13, str(part.tokens), size=11 if cell >= 18 else 9, anchor="middle",
                  ink=ink if reading else "#222", bold=reading)
    return body + (box(x + cell - 4, y, 4, 26, "#000", "#000") if part.last else "")


def _legend() -> str:
    body, x = "", 8.0
    for kind, label in (("prefill", "reads its prompt"), ("again", "reads again"), ("decode", "one new token"),
                        ("preempted", "preempted"), ("waiting", "waits"), ("last", "finished")):
        if kind == "waiting":
            body += f'<path d="M{x:g} 12 h18" stroke="{LINE}" stroke-width="2"/>'
        elif kind == "last":
            body += box(x + 7, 4, 4, 16, "#000", "#000")
        elif kind == "preempted":
            body += box(x, 4, 18, 16, "#fff", MARK) + write(x + 9, 12, "✗", size=11, anchor="middle", ink=MARK,
                                                            bold=True)
        else:
            body += box(x, 4, 18, 16, "#555555" if kind != "decode" else "#d5d5d5")
            if kind == "again":
                body += f'<rect x="{x:g}" y="4" width="18" height="16" fill="url(#again)" opacity="0.55"/>'
        body += write(x + 24, 12, label, size=11)
        x += 46 + 6.6 * len(label)
    return body


def _bars(recording: StepRecording, cell: float, foot: float) -> str:
    """Blocks in use per step, the size of the pool as a line."""
    top, width = foot + 14, len(recording.history) * cell
    body = write(8, top + BARS / 2, "blocks", size=10.5) + write(8, top + BARS / 2 + 13, "in use", size=10.5)
    for step, record in enumerate(recording.history):
        high = BARS * record.used_blocks / recording.num_blocks
        body += box(LEFT + step * cell, top + BARS - high, cell, high, "#c9c9c9")
        if cell >= 18:
            body += write(LEFT + (step + 0.5) * cell, top + BARS - 8, str(record.used_blocks), size=10, anchor="middle")
    body += f'<path d="M{LEFT:g} {top:g} h{width:g}" stroke="#222" stroke-width="1" stroke-dasharray="4 3"/>'
    return body + write(LEFT, top - 9, f"the pool has {recording.num_blocks} blocks", size=10.5)


def _describe_row(row: dict[int, Slice]) -> str:
    """``{1: prefill 8, 2: decode 1, 3: decode 1}`` → ``"reads 8 in step 1, one token a step in 2–3, finished"``."""
    groups: list[list] = []
    for step, part in row.items():
        what = {"prefill": f"reads {part.tokens} in", "again": f"reads {part.tokens} again in",
                "decode": "one token in", "preempted": "preempted in", "waiting": "waits in"}[part.kind]
        if groups and groups[-1][0] == what and groups[-1][2] == step - 1:
            groups[-1][2] = step
        else:
            groups.append([what, step, step])
    return ", ".join(f"{what} step {a}" if a == b else f"{what} steps {a}–{b}" for what, a, b in groups) + ", finished"
