"""What stands around the lines of every figure: title, axes, legend, ticks; a title that was given is the title."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.reports import make_report
from matplotlib.colors import to_hex
from test_figures_measured import history, positions
from test_figures_oplogs import call, died, waits

from course import figures
from tplab import show
from tplab.ranks import RankError
from tplab.ranks.errors import Cause

NAN, FOURS = math.nan, torch.full((4, 2, 2), 4.0)
BROKEN, FIXED = make_report({"layers.1.q_rope": 0.5}), make_report()
DIFFERENCE = "largest |tplab − HF|,\nrelative to HF's largest value"
SHARES = [{"embed": torch.zeros(2), "layers.0.q": torch.tensor([0, 0.5]), "layers.1.q": torch.ones(2)}]
COSTS = {"shared": {4: [1e-5] * 3, 16: [1e-3] * 3, 64: [1e-3] * 3}}

# name: (figure, its own title, names of the axes, legend)
FIGURES = {
    "diff": (lambda **given: show.diff_figure({"a": BROKEN, "fixed": FIXED}, **given),
             "“a” leaves the floor at layers.1.q_rope; “fixed” never does",
             ("where it is measured: embedding, each layer's output, final norm, logits", DIFFERENCE),
             ["a: first outside at layers.1.q_rope", "fixed: inside the floor"]),
    "staircase": (lambda **given: show.staircase({"after 01": BROKEN, "finished": FIXED}, **given),
                  "Down the stairs: “finished” is inside the rounding floor at every point",
                  ("where it is measured: embedding, each layer's output, final norm, logits", DIFFERENCE),
                  ["after 01: first outside at layers.1.q_rope", "finished: inside the floor"]),
    "points": (lambda **given: show.points_figure({"a": BROKEN, "b": FIXED}, **given),
               "Layer 1: first off the floor: q_rope (a), none (b)",
               ("points of layer 1, in the order of the computation", DIFFERENCE), ["a", "b"]),
    "positions": (lambda **given: figures.position_figure({"a": positions(FOURS), "b": positions(FOURS + 1)}, **given),
                  "layers.0.q_rope, token by token", ("position of the token in the prompt", DIFFERENCE), ["a", "b"]),
    "mask": (lambda **given: figures.mask_figure({"m": torch.tensor([[NAN, -math.inf], [math.inf, 1]])}, **given),
             "“m” turns 1 of 4 entries into NaN", ("key", "query"), ["hidden (-inf)", "NaN", "+inf"]),
    "nan map": (lambda **given: figures.nan_map(["x", "y"], SHARES, **given),
                "NaN begins at layers.0.q, and nothing is left from layers.1.q on", ("", "rank 0"),
                ["some of the token's numbers are NaN", "all of them are"]),
    "op logs": (lambda **given: figures.op_logs(RankError("x", [died(1), waits(0)], [[call(1, left=False)], []]),
                                                **given),
                "Collectives in order, and where the ranks part", ("", ""), None),
    "tokens": (lambda **given: figures.tokens_per_step_figure({"a": history(9, 1), "b": history(3)}, **given),
               "Tokens computed in each step",
               ("step (the first one reads the prompt)", "tokens computed"), ["a", "b"]),
    "bars": (lambda title="Half": figures.bars_figure({"r": {"a": 1.0, "b": 2.0}}, "MB", title, "memory"), "Half",
             ("MB", ""), ["a", "b"]),
    "cost": (lambda **given: figures.collective_cost_figure(COSTS, {"one token": 16}, **given),
             "The cost of a collective",
             ("size of the message on each rank", "time of one collective"),
             ["shared: 10 µs for small messages, then 0.0 GB/s"]),
    "threads": (lambda **given: figures.threads_figure({1: [1.0] * 3, 2: [2.0] * 3}, 2, 1, **given),
                "Threads of ranks that share the cores",
                ("time of one step, relative to one thread per rank (this machine has 1 free core)", ""), None),
}


@pytest.mark.parametrize("name", FIGURES)
def test_what_stands_around_the_lines(name):
    make, title, axes, legend = FIGURES[name]
    figure = make()
    assert figure.get_suptitle().replace("\n", " ") == title
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == axes
    assert [[text.get_text() for text in one.get_texts()] for one in figure.legends] == ([legend] if legend else [])
    assert not figure.axes[0].spines["top"].get_visible() or name in ("mask", "nan map"), "the lab's style"
    assert make(title="What I found").get_suptitle() == "What I found"


def test_the_staircase_that_does_not_reach_the_floor_says_where_it_ends():
    title = show.staircase({"after 01": FIXED, "after 02": BROKEN}).get_suptitle().replace("\n", " ")
    assert title == "“after 02” still leaves the floor, at layers.1.q_rope: there are bugs left"


@pytest.mark.parametrize("outside, title", [
    ({}, "Layer 0: every point is inside the floor"),
    ({"layers.1.k_rope": 0.5}, "Layer 1: after RoPE K differs, while V matches: an error of position"),
    ({"layers.2.input_norm": 0.5}, "Layer 2: input_norm is the first point off the floor"),
    ({"layers.1.attn": 0.5}, "Layer 1: attn is the first point off the floor; all before it match"),
    ({"embed": 0.5}, "Layer 0: input_norm is the first point off the floor"),
])
def test_the_finding_within_a_layer(outside, title):
    report = make_report(outside)
    if "layers.1.k_rope" in outside:
        point = report["layers.1.q_rope"]
        assert point.inside, "q comes before k"
    assert show.points_figure(report).get_suptitle().replace("\n", " ") == title


def test_many_layers_are_named_by_steps_and_the_ends_always():
    ax = show.diff_figure({"fixed": make_report(layers=30)}).axes[0]
    labels = {label.get_text(): label for label in ax.get_xticklabels()}
    assert list(labels) == ["embed", *map(str, range(0, 30, 4)), "norm", "logits"]
    assert [name for name, label in labels.items() if label.get_rotation()] == ["embed", "norm", "logits"]
    assert ax.get_xlim() == (-0.5, 32.5)


def test_a_title_is_broken_before_the_figures_edge():
    long = show.diff_figure({"fixed": FIXED}, title="word " * 40).get_suptitle().splitlines()
    assert len(long) == 3 and 70 < max(map(len, long)) <= 81


def test_floors_are_named_once_for_each_dtype():
    reports = {"a": make_report(), "b": make_report(dtype=torch.float64, quiet=1e-12), "c": make_report()}
    figure = show.diff_figure(reports)
    assert {text.get_text() for text in figure.axes[0].texts} == {"float32: rounding floor 2e-5",
                                                                  "float64: rounding floor 2e-7"}
    assert "(float32: floor 2e-5 and float64: floor 2e-7)" in figure.alt_text


def test_the_axis_reaches_over_what_is_drawn():
    ax = show.diff_figure({"broken": make_report({"layers.0.q": 3000.0}), "fixed": make_report(quiet=1e-9)}).axes[0]
    low, high = ax.get_ylim()
    assert low < -9 and math.log10(3000) < high <= 4.2


def test_the_tokens_of_a_mask_stand_at_its_axes_where_there_is_room():
    table = torch.arange(6.0).reshape(2, 3)
    ax = figures.mask_figure({"m": table}, tokens=["a", "b", "c"]).axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "c"], "the queries are the last ones"
    for tokens, other in ((["a", "b"], table), (list("abcdefghijklmnopq"), torch.zeros(17, 17))):
        ax = figures.mask_figure({"m": other}, tokens=tokens).axes[0]
        assert "a" not in [label.get_text() for label in ax.get_xticklabels()]
    weights = figures.mask_figure({"left": table, "right": table}, what="weight")
    assert [ax.get_title(loc="left") or ax.get_title() for ax in weights.axes[:2]] == ["left", "right"]
    assert weights.axes[-1].get_ylabel() == "weight" and weights.alt_text.startswith("Figure: attention weights, ")
    all_hidden = figures.mask_figure({"m": torch.full((2, 2), -math.inf)})
    assert all_hidden.axes[0].images[0].get_clim() == (0.0, 1.0)


def test_the_map_of_nan_names_tokens_and_layers():
    figure = figures.nan_map(["x", "y"], SHARES * 2)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["x", "y"]
    assert [(text.get_text(), text.xy[0]) for text in figure.axes[0].texts] == [("layer 0", 1.0), ("layer 1", 2.0)]
    assert not figure.axes[1].texts and figure.axes[1].get_ylabel() == "rank 1"


def test_costs_are_marked_and_written_in_micro_and_milliseconds():
    ax = figures.collective_cost_figure(COSTS, {"one token": 16}).axes[0]
    assert [(text.get_text(), text.xy[0]) for text in ax.texts] == [("one token\n16 B", 16)]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4 B", "64 B"]
    assert [ax.yaxis.get_major_formatter()(value, 0) for value in (1e-5, 9e-4, 1e-3, 0.02)] == [
        "10 µs", "900 µs", "1 ms", "20 ms"]
    assert "Marked" not in figures.collective_cost_figure(COSTS).alt_text


def test_where_a_collective_was_called_stands_in_its_box():
    logs = [[replace(call(1), file=file)] for file in ("/a/deep/mine.py", "/a/ipykernel_7/123.py")]
    figure = figures.op_logs(RankError("x", [died(0), died(1)], logs))
    assert [text.get_text() for text in figure.axes[0].texts if "float32" in text.get_text()] == [
        "all_reduce\n[4] float32\nmine.py, line 7", "all_reduce\n[4] float32\nline 7"]


@pytest.mark.parametrize("kind, text, mark, colour", [
    ("raised", "raised ValueError: x at cell In[3], line 9", "✗ raised \nValueError", "#d55e00"),
    ("died", "died (SIGKILL) after x", "✗ died\n(SIGKILL)", "#d55e00"),
    ("returned", "returned", "✓ returned", "#8a8a8a"),
    ("running", "is still running at a.py, line 4", "↻ is still running", "#0072b2"),
    ("stopped", "stopped", "■ stopped", "#8a8a8a"), ("other", "went away", "? other", "#8a8a8a")])
def test_how_a_rank_ended_stands_behind_its_last_collective(kind, text, mark, colour):
    error = RankError("x", [waits(0), Cause(1, kind, text)], [[call(1), call(2, left=False)], [call(1)]])
    figure = figures.op_logs(error)
    assert mark.replace(" \n", "\n") in [one.get_text() for one in figure.axes[0].texts]
    boxes = [patch for patch in figure.axes[0].patches if type(patch).__name__ == "FancyBboxPatch"]
    assert to_hex(boxes[-1].get_edgecolor()) == colour
