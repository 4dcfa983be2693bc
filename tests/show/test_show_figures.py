"""Figures: the right lines at the right heights, fixed looks, and words that stay the same from machine to machine."""

import math
import warnings

import pytest
import torch
from helpers.reports import make_report
from matplotlib.colors import to_hex

from course import figures
from tplab import show
from tplab.errors import TplabError

NAN = math.nan
NAN_FROM_START = {"layers.0.attn": NAN}


def lines(figure, ax=0):
    """{label: (xs, heights)} of the drawn lines; a line that changes lanes is put together again."""
    (axes,) = [figure.axes[ax]]
    by_look = {}
    for line in axes.get_lines():
        xs, ys = line.get_data()
        if line.get_marker() not in ("None", None, "") and len(xs):
            by_look.setdefault((to_hex(line.get_color()), line.get_marker()), []).extend(zip(xs, ys))
    return by_look


def ticks(figure):
    axes = figure.axes[0]
    return {label.get_text(): at for at, label in zip(axes.get_yticks(), axes.get_yticklabels())}


def test_values_stand_at_their_power_of_ten_and_nan_and_zero_in_lanes_of_their_own():
    figure = show.diff_figure({"broken": make_report(NAN_FROM_START), "fixed": make_report(quiet=1e-7)})
    drawn, at = lines(figure), ticks(figure)
    broken, fixed = drawn["#d55e00", "X"], drawn["#009e73", "o"]
    assert len(broken) == len(fixed) == 4 + 3  # layers, embedding, norm, logits
    assert [y for x, y in fixed if x > 0] == pytest.approx([-7] * 6)
    top, bottom = at["1"] + 0.5, at["$10^{-7}$"] - 0.5
    assert all(y > top for x, y in broken if x > 0), "NaN stands above every number"
    assert [y < bottom
            for x, y in broken + fixed if x == 0] == [True, True], "exact agreement stands below every number"
    assert at["NaN"] > top and at["exactly 0"] < bottom


@pytest.mark.parametrize("dtype, floor", [(torch.float32, 2e-5), (torch.float64, 2e-7)])
def test_the_floor_is_a_band_that_ends_at_the_dtypes_floor(dtype, floor):
    figure = show.diff_figure({"fixed": make_report(dtype=dtype, quiet=floor / 100)})
    tops = [patch.get_y() + patch.get_height() for patch in figure.axes[0].patches]
    assert any(top == pytest.approx(math.log10(floor)) for top in tops)
    assert [line.get_ydata()[0] for line in figure.axes[0].get_lines() if line.get_linestyle() == "-"
            and list(line.get_xdata()) == [0, 1]] == pytest.approx([math.log10(floor)])


def test_a_stage_looks_the_same_in_every_figure():
    few = show.staircase({"after 02": make_report({"layers.0.q_rope": 0.5}), "finished": make_report()})
    many = show.staircase({stage: make_report({"layers.0.q": 0.5}) for stage in show.STAGES})
    assert set(lines(few)) <= set(lines(many))
    assert [(stage, look.color, look.marker) for stage, look in show.STAGES.items()] == [
        ("seed engine", "#D55E00", "X"), ("after 01", "#E69F00", "v"), ("after 02", "#CC79A7", "s"),
        ("after 03", "#56B4E9", "D"), ("after 04", "#0072B2", "^"), ("after 05", "#000000", "P"),
        ("finished", "#009E73", "o")], "the notebooks' words name some of them"
    assert len({look.color for look in show.STAGES.values()}) == len({look.marker
                                                                      for look in show.STAGES.values()}) == 7


def test_disagreement_between_ranks_is_a_difference_even_where_the_first_rank_is_right():
    figure = show.diff_figure({"fixed": make_report(spread={"layers.1.output": 4.0})})
    at = dict(lines(figure)["#d55e00", "X"] if ("#d55e00", "X") in lines(figure) else lines(figure)["#009e73", "o"])
    assert at[2] == pytest.approx(0)  # 4 of a scale of 4
    assert at[1] == at[3] == pytest.approx(-7)


@pytest.mark.parametrize("reports, words", [
    ({}, "no report"),
    ({"a": make_report(layers=2), "b": make_report(layers=3)}, "different numbers of layers"),
])
def test_what_cannot_share_a_figure_is_refused(reports, words):
    with pytest.raises(TplabError, match=words):
        show.diff_figure(reports)


def test_a_staircase_has_stages_only():
    with pytest.raises(TplabError, match="'after 07' is no stage"):
        show.staircase({"after 07": make_report()})


def test_titles_state_the_finding():
    assert show.diff_figure({"fixed": make_report()})._suptitle.get_text().startswith("Only rounding is left")
    both = show.diff_figure({"broken": make_report(NAN_FROM_START), "fixed": make_report()})
    assert both._suptitle.get_text() == "“broken” leaves the floor at layers.0.attn; “fixed” never does"
    left = show.staircase({"after 02": make_report({"layers.0.q_rope": 0.5})})
    assert "still leaves the floor, at layers.0.q_rope" in left._suptitle.get_text()


def test_words_name_the_first_point_and_no_number_below_the_floor():
    words = show.describe(show.diff_figure({"broken": make_report(NAN_FROM_START), "fixed": make_report()}))
    assert words.startswith("Figure: ") and "\n" not in words
    assert "broken: first outside the floor at layers.0.attn (36 % NaN)" in words
    assert "fixed: inside the float32 floor at every point" in words


def test_rounding_noise_does_not_change_the_words():
    """Another machine adds in another order; what it stores must compare equal."""
    def told(quiet, broken):
        reports = {"broken": make_report({"layers.0.q_rope": broken}, quiet=quiet), "fixed": make_report(quiet=quiet)}
        return [show.describe(show.diff_figure(reports)), show.describe(show.points_figure(reports)),
                show.describe(reports), str(show.layer_table(reports["broken"], layer=0))]
    assert told(1e-7, 0.61) == told(9e-7, 0.61 + 1e-6)


@pytest.mark.parametrize("value, words", [(0, "exactly 0"), (NAN, "NaN"), (math.inf, "infinite"), (3.7e-3, "1e-2"),
                                          (0.1, "0.1"), (0.0949, "0.09"), (0.038, "0.04"), (0.01, "0.01"),
                                          (0.97, "1"), (9.4, "9"), (9.6, "10"), (12, "10"), (94, "90"),
                                          (96, "1e+2"), (200, "1e+2"), (4e4, "1e+5")])
def test_magnitudes(value, words):
    assert show.magnitude(value, floor=0) == words


@pytest.mark.parametrize("value", [0, 1e-7, 1e-6, 9e-5])
def test_what_can_be_rounding_is_only_below_a_power_of_ten(value):
    assert show.magnitude(value) == "less than 1e-4" and show.magnitude(value / 100, floor=2e-7) == "less than 1e-6"


def test_points_of_a_layer_show_the_signature_of_a_wrong_position():
    figure = show.points_figure(make_report({"layers.1.q_rope": 0.5}))
    assert figure._suptitle.get_text() == "Layer 1: after RoPE Q and K differ, while V matches: an error of position"
    names = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    outside, inside = (dict(lines(figure)[look]) for look in (("#d55e00", "X"), ("#009e73", "o")))
    place = {names[round(x)] for x in (round(x) for x in inside)}
    assert place == {"input_norm", "q", "k", "v"} and {names[round(x)] for x in outside} == set(names) - place
    assert "input_norm to v inside the floor, q_rope to output 0.5" in figure.alt_text


def test_points_of_a_layer_that_is_not_there():
    with pytest.raises(TplabError, match="no layer 9; fable has 0 to 3"):
        show.points_figure(make_report(), layer=9)


def test_figures_draw_without_a_warning_and_show_themselves_once_with_their_words():
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import display
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    deep = show.diff_figure({"broken": make_report({"layers.5.attn": NAN}, layers=30), "fixed": make_report(layers=30)})
    for figure in (deep, show.points_figure({"a": make_report(NAN_FROM_START), "b": make_report()}),
                   figures.mask_figure({"x": torch.zeros(3, 3)}, ["a", "b", "c"])):
        with warnings.catch_warnings(), capture_output() as shown:
            warnings.simplefilter("error")
            display(figure)
        (output,) = shown.outputs
        assert set(output.data) == {"image/png", "text/plain"} and "0x" not in output.data["text/plain"]
        assert output.metadata["image/png"]["alt"] == figure.alt_text.removeprefix("Figure: ")
        assert " ".join(shown.stdout.split()) == figure.alt_text and max(map(len, shown.stdout.splitlines())) <= 100


def test_nothing_to_describe():
    with pytest.raises(TplabError, match="nothing to describe in int"):
        show.describe(3)
