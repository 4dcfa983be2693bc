"""Where texts part, how near the tie was, and one sum in many orders."""

import pytest
import torch
from matplotlib.colors import to_rgb

from course import figures
from tplab import show


def test_a_text_is_in_another_ink_behind_the_first_difference():
    texts = {"1 rank": ["the", " fox", " ran", "\n"], "2 ranks": ["the", " dog", " ran", " off"]}
    figure = figures.texts_figure(texts, "Two answers")
    inks = [(text.get_text(), text.get_color(), text.get_fontweight()) for text in figure.axes[0].texts]
    ink, red = "#222222", "#D55E00"
    assert inks[:5] == [("1 rank:", ink, "bold"), ("the", ink, "normal"), (" fox", ink, "normal"),
                        (" ran", ink, "normal"), ("⏎", ink, "normal")]
    assert inks[5:] == [("2 ranks:", ink, "bold"), ("the", ink, "normal"), (" dog", red, "bold"),
                        (" ran", red, "normal"), (" off", red, "normal")]
    assert "fox" not in figure.alt_text and "dog" not in figure.alt_text, "which tokens flip depends on the machine"
    with pytest.raises(show.ShowError, match="the tokens of a text"):
        figures.texts_figure({"1 rank": []}, "")


def test_long_texts_go_on_in_the_next_line_of_the_page():
    places = [text.get_position() for text in figures.texts_figure({"a": [" word"] * 60}, "").axes[0].texts[1:]]
    assert max(x for x, _ in places) <= 105 and len({y for _, y in places}) == 3 and len(set(places)) == 60


def test_tokens_that_flip_stand_on_or_above_the_diagonal_and_ties_at_its_edge():
    one = torch.tensor([[5.0, 4.9, 0], [5, 1, 0], [3, 3, 0], [2, 0, 1.9]])
    other = torch.tensor([[5.0, 5.1, 0], [5, 1, 0], [2, 3, 0], [2, 1.9, 2.1]])
    ax = figures.margins_figure({"bfloat16": (one, other)}, "Near ties flip").axes[0]
    (right, flipped, diagonal), low = ax.lines, 0.1 / 4  # a quarter of the smallest number there is
    assert (right.get_xdata().tolist(), right.get_ydata().tolist()) == ([4], [pytest.approx(low)])
    assert flipped.get_xdata().tolist() == pytest.approx([0.1, low, 0.1])
    assert flipped.get_ydata().tolist() == pytest.approx([0.2, 1, 0.2])
    assert all(flipped.get_ydata() >= flipped.get_xdata()) and all(diagonal.get_xdata() == diagonal.get_ydata())
    assert [label.get_text() for label in ax.get_xticklabels()][0] == "0"


def test_a_dtype_has_the_colour_that_it_has_in_bars():
    run = (torch.tensor([[2.0, 1]]), torch.tensor([[2.5, 1]]))
    points = figures.margins_figure({"bfloat16": run, "float32": run}, "").axes[0].lines[:2]
    bars = figures.bars_figure({"r": {"bfloat16": 1, "float32": 1}}, "", "", "").axes[0].patches[:2]
    assert [to_rgb(line.get_color()) for line in points] == [bar.get_facecolor()[:3] for bar in bars]


def test_results_stand_as_high_as_they_came_out_often():
    figure = figures.orders_figure({"bfloat16": ([1.0, 1.5, 1.0], 1.2), "float32": ([1.25] * 3, 1.2)}, "Orders")
    bars = {ax.get_title(loc="left"): [line[:, 1].tolist() for line in ax.collections[0].get_segments()]
            for ax in figure.axes}
    assert bars == {"bfloat16: 2 results\nlargest − smallest: 0.5": [[0, 2], [0, 1]],
                    "float32: 1 result\nlargest − smallest: 0": [[0, 3]]}
    assert figure.alt_text.endswith("bfloat16: 2 different in 3 orders; float32: 1 different in 3 orders.")
