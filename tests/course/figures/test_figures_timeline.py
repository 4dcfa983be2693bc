"""The timeline of continuous batching: every token that was computed stands in it, and what happened to whom."""

import xml.etree.ElementTree as ET

import pytest
from helpers.checkpoints import make_checkpoint

from course import figures
from course.figures.timeline import slices
from tplab import LLM, SamplingParams, show
from tplab.show.drawings.blocks import tint
from tplab.show.drawings.svg import colour

SVG = "{http://www.w3.org/2000/svg}"
PROMPTS = [list(range(1, 12)), list(range(12, 21)), list(range(21, 30)), list(range(30, 41))]


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("timeline") / "m", "qwen2", seed=3)
    with LLM(folder, 1, logical=True, block_size=4, num_blocks=10, max_num_batched_tokens=12,
             enable_prefix_caching=False, strict=True) as llm:
        return show.record(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
                           arrivals=[0, 0, 2, 5])


def test_every_computed_token_stands_in_its_step(busy):
    rows = slices(busy)
    for at, record in enumerate(busy.history, 1):
        assert {n: row[at].tokens for n, row in rows.items() if at in row and row[at].tokens} == record.tokens


def test_kinds_tell_reading_writing_and_losing_ones_place(busy):
    rows = slices(busy)
    assert [rows[1][step].kind for step in (1, 2, 3)] == ["prefill", "prefill", "decode"], "a prompt in two pieces"
    lost = [number for number, output in enumerate(busy.outputs) if output.metrics.preemptions]
    assert lost == [number
                    for number, row in rows.items() if any(part.kind == "preempted" for part in row.values())] != []
    for number, row in rows.items():
        kinds = [part.kind for part in row.values()]
        again = kinds.index("again") if "again" in kinds else 0
        assert (number in lost) == bool(again) and "preempted" not in kinds[again:]
        assert [part.last for part in row.values()] == [False] * (len(row) - 1) + [True]
        assert sum(kind == "prefill" for kind in kinds) >= 1 and min(row) == busy.arrivals[number] + 1


def test_the_drawing_has_a_cell_per_slice_and_words_for_each_sequence(busy):
    figure = figures.timeline_figure(busy)
    drawn = [node.text for node in ET.fromstring(figure.svg).iter(f"{SVG}text")]
    legend = ["reads its prompt", "reads again", "one new token", "preempted", "waits", "finished"]
    assert [text for text in drawn if text in legend] == legend and drawn[drawn.index("✗") + 1] == "preempted"
    assert drawn.count("✗") == 1 + sum(len(record.preempted) for record in busy.history), "one stands in the legend"
    assert all(f"seq {number}" in drawn for number in range(4)) and "the pool has 10 blocks" in drawn
    assert "sequence 1: reads 1 in step 1, reads 8 in step 2, one token in steps 3–9, finished" in figure.alt_text
    assert "At most 10 of 10 blocks in use." in figure.alt_text


def test_of_many_steps_the_first_and_every_fifth_are_numbered_and_bars_are_parts_of_the_pool(tmp_path):
    with LLM(make_checkpoint(tmp_path / "m", "qwen2", seed=3), 1, logical=True, block_size=4, num_blocks=40) as llm:
        run = show.record(llm, [list(range(1, 8))], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    svg = figures.timeline_figure(run).svg
    nodes = [(float(n.get("y")), n.text) for n in ET.fromstring(svg).iter(f"{SVG}text")]
    assert [text for y, text in nodes if y == 36 and text != "step"] == ["1", *map(str, range(5, 49, 5))]
    bars = [float(n.get("height")) for n in ET.fromstring(svg).iter(f"{SVG}rect") if n.get("fill") == "#c9c9c9"]
    assert bars == pytest.approx([58 * record.used_blocks / 40 for record in run.history], rel=1e-3) and len(bars) == 48
    assert "At most 14 of 40 blocks in use." in figures.timeline_figure(run).alt_text


def test_every_cell_stands_below_its_step_and_every_bar_says_how_many_blocks_were_used(busy):
    figure = figures.timeline_figure(busy)
    nodes = [(float(n.get("x")), float(n.get("y")), n.text) for n in ET.fromstring(figure.svg).iter(f"{SVG}text")]
    column = {int(text): x for x, y, text in nodes if y == 36 and text.isdigit()}
    assert list(column) == list(range(1, len(busy.history) + 1))
    for line, row in enumerate(slices(busy).values()):
        cells = {x: text for x, y, text in nodes if y == 44 + 30 * line + 13 and x >= 62}
        assert cells == {column[at]: "✗" if part.kind == "preempted" else str(part.tokens)
                         for at, part in row.items() if part.kind != "waiting"}
    boxes = {(float(n.get("x")), float(n.get("y"))): n.get("fill") for n in ET.fromstring(figure.svg).iter(f"{SVG}rect")
             if n.get("height") == "26" and n.get("width") != "4" and not n.get("fill").startswith("url")}
    bold = {(float(n.get("x")), float(n.get("y"))) for n in ET.fromstring(figure.svg).iter(f"{SVG}text")
            if n.get("font-weight")}
    for line, (number, row) in enumerate(slices(busy).items()):
        looks = {"prefill": colour(number)[0], "again": colour(number)[0], "decode": tint(number), "preempted": "#fff"}
        fills = {
            at: next((fill for (x, y), fill in boxes.items() if y == 44 + 30 * line and x < column[at] < x + 40
                      and column[at] - x < column[2] - column[1]), None) for at in row}
        assert fills == {at: looks.get(part.kind) for at, part in row.items()}
        assert {at for at in row if (column[at], 44 + 30 * line + 13) in bold} == {
            at for at, part in row.items() if part.kind in ("prefill", "again", "preempted")}
    bars = [tuple(float(n.get(name)) for name in ("y", "height")) for n in ET.fromstring(figure.svg).iter(f"{SVG}rect")
            if n.get("fill") == "#c9c9c9"]
    assert [high for _, high in bars] == pytest.approx(
        [58 * record.used_blocks / 10 for record in busy.history], rel=1e-3)
    assert [y + high for y, high in bars] == pytest.approx([sum(bars[0])] * len(bars), rel=1e-4)
    used = {x: text for x, y, text in nodes if y > 44 + 30 * 4 + 30 and text.isdigit()}
    assert used == {column[at]: str(record.used_blocks) for at, record in enumerate(busy.history, 1)}
