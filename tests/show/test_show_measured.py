"""Figures of what was measured or counted: every number stands where it belongs, and the text alternative agrees."""

from types import SimpleNamespace

import pytest
import torch
from helpers.reports import make_report
from matplotlib.colors import to_hex

from tplab import show
from tplab.align.report import Evidence


def history(*counts):
    """The scheduler's records of steps with so many tokens, of two sequences where there are more than one."""
    return [SimpleNamespace(tokens={0: count} if count == 1 else {0: 1, 1: count - 1}) for count in counts]


def test_tokens_per_step_count_from_the_first_step_and_are_summed_over_sequences():
    figure = show.tokens_per_step_figure({"cached": history(9, 2, 1, 3), "again": history(9, 10, 11)})
    first, second = figure.axes[0].get_lines()
    assert first.get_xdata().tolist() == [1, 2, 3, 4] and first.get_ydata().tolist() == [9, 2, 1, 3]
    assert first.get_label() == "cached" and second.get_ydata().tolist() == [9, 10, 11]
    assert figure.alt_text == ("Figure: tokens that the model computes in each step. cached: 9 in the first step, 3 in "
                               "the last, 15 in all; again: 9 in the first step, 11 in the last, 30 in all.")
    with pytest.raises(show.ShowError, match="computed no step yet"):
        show.tokens_per_step_figure({"cached": []})


def test_curves_are_what_was_measured_below_their_dashed_limits():
    found = {"sequences": {"1": {"1": (10.0, 20.0), "4": (30.0, 60.0)}, "2": {"1": (15.0, 25.0), "4": (45.0, 75.0)}},
             "context": {}}
    figure = show.curves_figure(found)
    lines = figure.axes[0].get_lines()
    assert [(line.get_linestyle(), *line.get_ydata()) for line in lines] == [
        ("-", 10, 30), ("--", 20, 60), ("-", 15, 45), ("--", 25, 75)]
    assert all(line.get_xdata().tolist() == [1, 4] for line in lines) and len(figure.axes) == 1
    assert [line.get_label() for line in lines[::2]] == ["1 rank", "2 ranks"]
    assert figure.alt_text.startswith("Figure: tokens per second while decoding against sequences, on log axes, for 1,")
    with pytest.raises(show.ShowError, match="curves_figure takes"):
        show.curves_figure({"sequences": {}, "context": {}})


def test_bars_are_as_long_as_their_numbers_and_stand_at_their_group():
    measured = {"rank 0": {"copy": 12.0, "slices": 6.5}, "rank 1": {"copy": 11.0}}
    figure = show.bars_figure(measured, "MB", "Half", "memory")
    ax = figure.axes[0]
    bars = [patch for patch in ax.patches if patch.get_width()]
    assert [bar.get_width() for bar in bars] == [12.0, 6.5, 11.0]
    assert to_hex(bars[0].get_facecolor()) == to_hex(bars[2].get_facecolor()) != to_hex(bars[1].get_facecolor())
    middles = [bar.get_y() + bar.get_height() / 2 for bar in bars]
    assert [(text.get_text(), *text.xy) for text in ax.texts] == [
        ("12 MB", 12.0, middles[0]), ("6.5 MB", 6.5, middles[1]), ("11 MB", 11.0, middles[2])]
    assert ax.get_yticks().tolist() == pytest.approx([(middles[0] + middles[1]) / 2, middles[2]])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"] and ax.yaxis_inverted()
    assert figure.alt_text == "Figure: memory: rank 0, rank 1; bars for copy, slices."


def test_threads_beyond_the_cores_are_red():
    figure = show.threads_figure({1: [1.0] * 3, 2: [2.0] * 3, 3: [3.0] * 3}, ranks=2, cores=4)
    colours = [to_hex(bar.get_facecolor()) for bar in figure.axes[0].patches if bar.get_height() == 0.5]
    assert len(set(colours)) == 3 and colours[1] == "#009e73" and colours[2] == "#d55e00"


def positions(ours):
    """A report whose evidence at one point has these rows beside rows of 4."""
    report = make_report()
    report.evidence["layers.0.q_rope"] = Evidence(ours, torch.full_like(ours, 4.0), [])
    return report


def test_positions_begin_at_0_and_are_relative_to_hugging_faces_largest_value():
    ours = torch.full((5, 2, 2), 4.0)
    ours[:, 1, 0] += torch.tensor([0.0, 0.04, 0.4, 4.0, 40.0])
    figure = show.position_figure({"a": positions(ours)}, "layers.0.q_rope")
    at = {x: y for line in figure.axes[0].get_lines() if line.get_marker() == "^" for x, y in zip(*line.get_data())}
    assert [at[x] for x in (1, 2, 3, 4)] == pytest.approx([-2, -1, 0, 1]) and at[0] < -2
    assert figure.alt_text.endswith("a: exactly 0 at position 0, 1e-2 at position 1, 10 at position 4.")
    first = show.position_figure({"a": positions(ours)}, "layers.0.q_rope", first=3)
    assert first.alt_text.endswith("0.1 at position 2.")
    with pytest.raises(show.ShowError, match="same prompt"):
        show.position_figure({"a": positions(ours), "b": positions(ours[:2])}, "layers.0.q_rope")
    with pytest.raises(show.ShowError, match="a: 'layers.1.q' is not in its evidence, which has logits,"):
        show.position_figure({"a": positions(ours)}, "layers.1.q")
