"""At which tokens a run of the engine is wrong: every token of every prompt, right, wrong or not computed."""

from itertools import islice

from tplab.show.drawings.blocks import short
from tplab.show.drawings.svg import LINE, Drawing, Svg, box, cell, write
from tplab.show.phrases import ShowError, row_distances

WRONG, RIGHT, FOUND, HIGH, WIDE = "#f3b98f", "#d9f0e8", "#ffffff", 30.0, 940.0


def token_grid_figure(report, tokenizer, point: str | None = None) -> Drawing:
    """Each prompt token by token, as far as it was computed: off the floor at a trace point, or found in the cache?

    A bar marks where decoding begins. ``report``: of :func:`tplab.align.align_decode`. ``point``: a trace point with a
    row per token; the first divergent one if not given, the final norm of a run without any.

        >>> figures.token_grid_figure(align_decode(ckpt, prompts, patches=[fault]), ckpt.tokenizer())
    """
    if report.decode is None:
        raise ShowError("token_grid_figure takes a report of align_decode")
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
