"""Figures of what was measured or counted: every number stands where it belongs, and the text alternative agrees."""

from types import SimpleNamespace

import pytest
import torch
from helpers.reports import make_report
from matplotlib.colors import to_hex

from course import figures
from tplab import show
from tplab.align.report import Evidence


def history(*counts):
    """The scheduler's records of steps with so many tokens, of two sequences where there are more than one."""
    return [SimpleNamespace(tokens={0: count} if count == 1 else {0: 1, 1: count - 1}) for count in counts]


def test_tokens_per_step_count_from_the_first_step_and_are_summed_over_sequences():
    figure = figures.tokens_per_step_figure({"cached": history(9, 2, 1, 3), "again": history(9, 10, 11)})
    first, second = figure.axes[0].get_lines()
    assert first.get_xdata().tolist() == [1, 2, 3, 4] and first.get_ydata().tolist() == [9, 2, 1, 3]
    assert figure.axes[0].get_ylim()[0] == 0 and first.get_label() == "cached"
    assert second.get_ydata().tolist() == [9, 10, 11]
    assert figure.alt_text == ("Figure: tokens that the model computes in each step. cached: 9 in the first step, 3 in "
                               "the last, 15 in all; again: 9 in the first step, 11 in the last, 30 in all.")
    with pytest.raises(show.ShowError, match="computed no step yet"):
        figures.tokens_per_step_figure({"cached": []})


def test_curves_are_what_was_measured_below_their_dashed_limits():
    found = {"sequences": {"1": {"1": (10.0, 20.0), "4": (30.0, 60.0)}, "2": {"1": (15.0, 25.0), "4": (45.0, 75.0)}},
             "context": {}}
    figure = figures.curves_figure(found)
    lines = figure.axes[0].get_lines()
    assert [(line.get_linestyle(), *line.get_ydata()) for line in lines] == [
        ("-", 10, 30), ("--", 20, 60), ("-", 15, 45), ("--", 25, 75)]
    assert all(line.get_xdata().tolist() == [1, 4] for line in lines) and len(figure.axes) == 1
    assert [line.get_label() for line in lines[::2]] == ["1 rank", "2 ranks"]
    assert figure.alt_text.startswith("Figure: tokens per second while decoding against sequences, on log axes, for 1,")
    with pytest.raises(show.ShowError, match="curves_figure takes"):
        figures.curves_figure({"sequences": {}, "context": {}})


def test_each_panel_of_curves_says_its_own_numbers():
    figure = figures.curves_figure({"sequences": {"1": {"1": (63.0, 69.0), "64": (687.0, 727.0)}},
                                 "context": {"1": {"128": (62.0, 68.0), "4096": (29.7, 32.7)}}})
    figure.draw_without_rendering()
    for ax, wanted in zip(figure.axes, ({"100", "200", "500"}, {"30", "40", "50", "60"})):
        low, high = ax.get_ylim()
        said = {label.get_text() for at, label in zip(ax.get_yticks(), ax.get_yticklabels()) if low <= at <= high}
        assert wanted <= said


def test_bars_are_as_long_as_their_numbers_and_stand_at_their_group():
    measured = {"rank 0": {"copy": 12.0, "slices": 6.5}, "rank 1": {"copy": 11.0}}
    figure = figures.bars_figure(measured, "MB", "Half", "memory")
    ax = figure.axes[0]
    bars = [patch for patch in ax.patches if patch.get_width()]
    assert [bar.get_width() for bar in bars] == [12.0, 6.5, 11.0]
    assert to_hex(bars[0].get_facecolor()) == to_hex(bars[2].get_facecolor()) != to_hex(bars[1].get_facecolor())
    middles = [bar.get_y() + bar.get_height() / 2 for bar in bars]
    assert middles == pytest.approx([0, 1, 2.7]), "a gap between groups"
    assert [(text.get_text(), *text.xy) for text in ax.texts] == [
        ("12 MB", 12.0, middles[0]), ("6.5 MB", 6.5, middles[1]), ("11 MB", 11.0, middles[2])]
    assert ax.get_yticks().tolist() == pytest.approx([(middles[0] + middles[1]) / 2, middles[2]])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"] and ax.yaxis_inverted()
    assert [text.get_text() for text in figure.legends[0].texts] == ["copy", "slices"]
    assert figure.alt_text == "Figure: memory: rank 0, rank 1; bars for copy, slices."


@pytest.mark.parametrize("value, said", [
    (1234.5, "1,234 s"), (1000, "1,000 s"), (999.4, "999 s"), (0.12345, "0.123 s")])
def test_a_bar_says_three_digits_or_whole_numbers_and_has_room_for_them(value, said):
    figure = figures.bars_figure({"r": {"a": value}}, "s", "t", "d")
    ax = figure.axes[0]
    assert not figure.legends, "one series needs no legend"
    assert [text.get_text() for text in ax.texts] == [said] and ax.get_xlim() == (0, pytest.approx(1.22 * value))
    with pytest.raises(show.ShowError, match="nothing to draw"):
        figures.bars_figure({"r": {}}, "s", "t", "d")


def test_a_bar_of_no_length_is_named_and_what_is_true_here_is_only_drawn():
    figure = figures.bars_figure({"r": {"a": 0, "b": 1}}, "s", "t", "d", here="on this machine")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0 s (a)", "1 s"]
    assert figure.axes[0].get_title("left") == "on this machine" and "machine" not in figure.alt_text


def test_two_panels_of_curves_share_one_legend_and_name_their_own_axis():
    found = {"sequences": {1: {1: (10.0, 20.0), 4: (30.0, 60.0)}}, "context": {1: {128: (9.0, 18.0)}}}
    figure = figures.curves_figure(found)
    assert [ax.get_xlabel() for ax in figure.axes] == ["sequences that decode together", "tokens of context"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1 rank"]
    assert [[label.get_text() for label in ax.get_xticklabels()] for ax in figure.axes] == [["1", "4"], ["128"]]
    assert [ax.get_ylabel() for ax in figure.axes] == ["tokens per second", ""]
    assert {(ax.get_xscale(), ax.get_yscale()) for ax in figure.axes} == {("log", "log")}
    assert "against sequences and context" in figure.alt_text


def test_threads_beyond_the_cores_are_red():
    figure = figures.threads_figure({1: [1.0] * 3, 2: [2.0] * 3, 3: [3.0] * 3}, ranks=2, cores=4)
    colours = [to_hex(bar.get_facecolor()) for bar in figure.axes[0].patches if bar.get_height() == 0.5]
    assert colours == ["#0072b2", "#009e73", "#d55e00"]
    crowded = figures.threads_figure({1: [1.0] * 3, 2: [2.0] * 3}, ranks=4, cores=2).axes[0]
    assert [to_hex(bar.get_facecolor()) for bar in crowded.patches] == ["#0072b2", "#d55e00"], "the yardstick is blue"
    ax = figure.axes[0]
    assert [text.xy for text in ax.texts] == [(2, 0.7), (3, 1.7)] and ax.get_xscale() == "log"
    low, high = ax.get_ylim()
    assert low > 2.5 and high < -0.5, "the first on top, all of them whole"
    assert (ax.xaxis.get_major_formatter()(1.5, 0), ax.xaxis.get_minor_formatter()(2.0, 0),
            ax.xaxis.get_minor_formatter()(4.0, 0)) == ("× 1.5", "× 2", "")
    spread = figures.threads_figure({1: [1.0] * 3, 2: [2.0, 4.0, 3.0, 6.0, 5.0]}, ranks=1, cores=2).axes[0]
    wide = [(bar.get_x(), bar.get_width()) for bar in spread.patches]
    assert wide[1] == (3, 2) and spread.get_xlabel().endswith("(this machine has 2 free cores)")
    assert sorted(line.get_xdata().tolist() for line in spread.get_lines() if len(line.get_xdata()) > 3) == [[
        2, 4, 3, 6, 5]], "every repetition"
    heights = [y for line in spread.get_lines() if line.get_marker() == "o" for y in line.get_ydata()]
    assert min(heights) == -0.16 and max(heights) == 1.16, "within its own bar"


def positions(ours):
    """A report whose evidence at one point has these rows beside rows of 4."""
    report = make_report()
    report.evidence["layers.0.q_rope"] = Evidence(ours, torch.full_like(ours, 4.0), [])
    return report


def test_positions_begin_at_0_and_are_relative_to_hugging_faces_largest_value():
    ours = torch.full((5, 2, 2), 4.0)
    ours[:, 1, 0] += torch.tensor([0.0, 0.04, 0.4, 4.0, 40.0])
    figure = figures.position_figure({"a": positions(ours)}, "layers.0.q_rope")
    at = {x: y for line in figure.axes[0].get_lines() if line.get_marker() == "^" for x, y in zip(*line.get_data())}
    assert [at[x] for x in (1, 2, 3, 4)] == pytest.approx([-2, -1, 0, 1]) and at[0] < -2
    assert figure.alt_text.endswith("a: inside the floor at position 0, 0.01 at position 1, "
                                    "10 at position 4.")
    apart = Evidence(torch.tensor([[1.0], [5.0]]), torch.tensor([[1.5], [4.0]]), [])
    report = make_report()
    report.evidence["norm"] = apart
    assert figures.position_figure({"a": report}, "norm").alt_text.endswith("a: 0.1 at position 0, 0.2 at position 1, "
                                                                         "0.2 at position 1."), "of 4, at both"
    assert figures.position_figure({"a": report}, "norm", first=1).alt_text.endswith("token by token. a: 0.1.")
    first = figures.position_figure({"a": positions(ours)}, "layers.0.q_rope", first=3)
    assert first.alt_text.endswith("0.1 at position 2.")
    with pytest.raises(show.ShowError, match="there is no report to draw"):
        figures.position_figure({})
    long = figures.position_figure({"a": positions(torch.full((40, 2, 2), 4.4))}).alt_text
    assert long == ("Figure: layers.0.q_rope, difference from Hugging Face token by token. a: 0.1 at position 0, "
                    "0.1 at position 1, 0.1 at position 15.")
    whole = figures.position_figure({"a": positions(torch.full((40, 2, 2), 4.4))}, first=None).alt_text
    assert whole.endswith("0.1 at position 39.")
    with pytest.raises(show.ShowError, match="same prompt"):
        figures.position_figure({"a": positions(ours), "b": positions(ours[:2])}, "layers.0.q_rope")
    with pytest.raises(show.ShowError, match="a: 'layers.1.q' is not in its evidence, which has logits,"):
        figures.position_figure({"a": positions(ours)}, "layers.1.q")
