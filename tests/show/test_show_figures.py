"""Figures: the right lines at the right heights, fixed looks, and words that stay the same from machine to machine."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from helpers.reports import make_report
from matplotlib.colors import to_hex

from course import figures
from tplab import show
from tplab.show.figures.style import looks
from tplab.show.phrases import describe_point, distance

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


def test_the_axis_begins_below_the_floor_and_has_a_tick_for_some_decades_and_each_lane():
    fine = show.diff_figure({"fixed": make_report(quiet=1e-5)})
    low, _ = fine.axes[0].get_ylim()
    assert low < math.log10(2e-6) - 0.3, "a decade of the band is there"
    assert list(ticks(fine)) == ["exactly 0", *(f"$10^{{{y}}}$" for y in range(-5, 0)), "1", "$10^{1}$"]
    far = show.diff_figure({"broken": make_report({"layers.1.q": 1e5, "layers.2.q": NAN}, quiet=1e-12)})
    names = [name for name in ticks(far) if name.startswith("$")]
    assert names == [f"$10^{{{y}}}$" for y in (-12, -9, -6, -3, 3)], names


def test_the_first_line_lies_lowest_with_the_largest_marks():
    figure = show.diff_figure({"a": make_report({"layers.0.q": 0.5}), "b": make_report({"layers.0.q": 0.4}),
                               "c": make_report()})
    a, b, c = (next(line for line in figure.axes[0].get_lines() if line.get_marker() == look.marker)
               for look in looks(["a", "b", "c"], [False, False, True]).values())
    assert a.get_zorder() < b.get_zorder() < c.get_zorder() and a.get_markersize() > b.get_markersize() > 8
    assert c.get_markersize() == 8 and a.get_linewidth() > b.get_linewidth() > c.get_linewidth() == 1.7
    stems = show.points_figure({"a": make_report(), "b": make_report()}, layer=0).axes[0].get_lines()
    assert {line.get_linewidth() for line in stems if line.get_marker() == "^"} == {0}, "marks of their own"


def test_engines_are_named_at_the_axis_where_they_are_one():
    mine = make_report()
    mine.engine = "mine"
    assert show.diff_figure({"a": mine}).axes[0].get_ylabel().startswith("largest |mine − HF|")
    assert show.diff_figure({"a": mine, "b": make_report()}).axes[0].get_ylabel().startswith("largest |engine − HF|")


def test_two_lines_of_nan_do_not_hide_each_other():
    figure = show.staircase({"seed engine": make_report(NAN_FROM_START), "after 01": make_report({"layers.1.q": NAN})})
    heights = [{y for x, y in points if y > 1} for points in lines(figure).values()]
    assert len(set.union(*heights)) == 2 and max(map(max, heights)) < figure.axes[0].get_ylim()[1]


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


def test_labels_that_are_no_stage_get_looks_of_their_own():
    reports = {"broken": make_report(NAN_FROM_START), "mine": make_report({"layers.0.q": 1.0}), "theirs": make_report()}
    assert len(lines(show.diff_figure(reports))) == 3
    one, two = (to_hex(look.color) for look in looks(["mine", "theirs"]).values())
    assert (one, two) == (to_hex(show.STAGES["after 04"].color), to_hex(show.STAGES["after 01"].color))
    assert looks(["right", "x", "y"], [True, False, True]) == {
        "right": show.STAGES["finished"], "x": show.STAGES["seed engine"], "y": show.STAGES["after 04"]}
    with pytest.raises(show.ShowError, match="7 lines"):
        show.diff_figure({str(i): make_report() for i in range(8)})


def test_disagreement_between_ranks_is_a_difference_even_where_the_first_rank_is_right():
    figure = show.diff_figure({"fixed": make_report(spread={"layers.1.output": 4.0})})
    at = dict(lines(figure)["#d55e00", "X"] if ("#d55e00", "X") in lines(figure) else lines(figure)["#009e73", "o"])
    assert at[2] == pytest.approx(0)  # 4 of a scale of 4
    assert at[1] == at[3] == pytest.approx(-7)


def test_nan_on_another_rank_than_the_first_is_drawn_as_nan():
    """What the ranks disagree about is then infinitely far apart."""
    figure = show.diff_figure({"broken": make_report(spread={"layers.2.output": math.inf})})
    (at,) = [y for x, y in lines(figure)["#d55e00", "X"] if x == 3]
    assert at > 1 and "NaN" in ticks(figure)
    assert "layers.2.output (NaN)" in figure.alt_text


def test_infinity_is_not_called_nan():
    report = make_report()
    report.points[-1] = report.points[-1].__class__(**{**vars(report.points[-1]), "inf": 3, "inside": False})
    figure = show.diff_figure({"broken": report})
    assert "inf" in ticks(figure) and "NaN" not in ticks(figure)
    assert "1 % infinite" in figure.alt_text


@pytest.mark.parametrize("reports, words", [
    ({}, "no report"),
    ({"a": make_report(layers=2), "b": make_report(layers=3)}, "different numbers of layers"),
])
def test_what_cannot_share_a_figure_is_refused(reports, words):
    with pytest.raises(show.ShowError, match=words):
        show.diff_figure(reports)


def test_a_staircase_has_stages_only():
    with pytest.raises(show.ShowError, match="'after 07' is no stage"):
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


def test_the_words_end_with_what_the_logits_say():
    words = show.describe(make_report({"layers.0.q": 0.5, "norm": 0.01, "logits": 0.2}))
    assert words == "first outside the floor at layers.0.q (0.5); logits: 0.2"
    few = replace(make_report()["logits"], nan=1, size=768, inside=False)
    assert describe_point(few) == "1 % NaN" and describe_point(replace(few, nan=0, inf=384)) == "50 % infinite"
    apart = replace(few, nan=0, max_abs=0.02, relative=0.01, spread=0.04)
    assert distance(apart) == pytest.approx(0.02) and distance(replace(apart, spread=0.02)) == 0.01
    assert distance(replace(apart, max_abs=0.0, relative=0.0)) == 0.04, "where all else is equal nothing says how large"


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


@pytest.mark.parametrize("value", [0, 1e-15, 1e-7, 1e-6, 2e-5, 9.9e-5])
def test_the_size_of_rounding_is_not_said(value):
    """It is another on the next processor, and can be 0 there."""
    assert show.magnitude(value) == show.magnitude(value, 2e-5) == "less than 1e-4"
    assert show.magnitude(1e-2 * value, 2e-7) == "less than 1e-6"
    assert show.magnitude(value, 0.4) == "less than 1"


def test_a_difference_above_the_floor_has_a_size():
    assert show.magnitude(1.2e-4) == "1e-4" and show.magnitude(1e-5, 2e-7) == "1e-5" and show.magnitude(NAN) == "NaN"


def test_points_of_a_layer_show_the_signature_of_a_wrong_position():
    figure = show.points_figure(make_report({"layers.1.q_rope": 0.5}))
    assert figure._suptitle.get_text() == "Layer 1: after RoPE Q and K differ, while V matches: an error of position"
    names = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    outside, inside = (dict(lines(figure)[look]) for look in (("#d55e00", "X"), ("#009e73", "o")))
    place = {names[round(x)] for x in (round(x) for x in inside)}
    assert place == {"input_norm", "q", "k", "v"} and {names[round(x)] for x in outside} == set(names) - place
    assert "input_norm to v inside the floor, q_rope to output 0.5" in figure.alt_text


def test_neighbouring_points_that_look_alike_are_named_together_and_others_are_not():
    report = make_report({"layers.0.q": 0.5, "layers.0.k": 1e-7, "layers.0.attn": 0.5})
    assert "input_norm inside the floor, q 0.5, k to k_rope inside the floor, attn to output 0.5." in (
        show.points_figure(report, layer=0).alt_text)


def test_a_recorded_engine_may_have_no_values():
    report = make_report({"layers.0.q_rope": 0.5})
    report.points = [point for point in report.points if not point.name.endswith(".v")]
    assert show.points_figure(report).get_suptitle() == (
        "Layer 0: q_rope is the first point off the floor; all before it match")


def test_the_first_layer_is_that_in_which_the_first_report_leaves_the_floor():
    second, none = make_report({"layers.2.q": 0.5}), make_report()
    assert "layer 2" in show.points_figure({"a": second, "b": none}).alt_text
    assert "layer 0" in show.points_figure({"b": none, "a": second}).alt_text


def test_marks_of_several_stand_beside_each_other_on_stems_of_their_own():
    figure = show.points_figure({"a": make_report({"layers.0.q": 0.5}), "b": make_report()}, layer=0)
    (a, *_), (b, *_) = (sorted(one) for one in lines(figure).values())
    assert (a[0], b[0]) == pytest.approx((-0.11, 0.11)) and a[1] == b[1] == pytest.approx(-7)
    stems = [path.vertices[:, 0].tolist() for one in figure.axes[0].collections for path in one.get_paths()]
    assert [at for at, _ in stems[:3]] == pytest.approx([-0.11, 0.89, 1.89])
    names = figure.axes[0].get_xticklabels()
    assert len(stems) == 2 * len(names) and figure.axes[0].get_xlim() == (-0.6, len(names) - 0.4)
    alone = show.points_figure(make_report({"layers.0.q": 0.5}), layer=0)
    assert [at for at, _ in lines(alone)["#d55e00", "X"]][:2] == [1.0, 2.0], "alone it stands at its point"


def test_points_of_a_layer_that_is_not_there():
    with pytest.raises(show.ShowError, match="no layer 9; fable has 0 to 3"):
        show.points_figure(make_report(), layer=9)


def test_masks_mark_what_is_lost_and_what_is_hidden():
    scores = torch.arange(16.0).reshape(4, 4)
    future = torch.ones(4, 4).triu(1)
    figure = figures.mask_figure({"times": scores + future * -math.inf,
                               "filled": scores.masked_fill(future.bool(), -math.inf)})
    crosses = figure.axes[0].collections[0].get_offsets()
    assert {(int(k), int(q)) for k, q in crosses} == {(k, q) for q in range(4) for k in range(4) if k <= q}
    assert len(figure.axes[0].patches) == len(figure.axes[1].patches) == 6
    assert "times: of 16 entries, 6 hidden (-inf), 10 NaN." in figure.alt_text
    assert "filled: of 16 entries, 10 numbers, 6 hidden (-inf)." in figure.alt_text


def test_an_arrow_is_plus_infinity_and_nothing_else():
    figure = figures.mask_figure({"m": torch.tensor([[math.inf, -math.inf], [1.0, NAN]])})
    crosses, arrows = ([tuple(map(int, at)) for at in one.get_offsets()] for one in figure.axes[0].collections)
    assert (crosses, arrows) == ([(1, 1)], [(0, 0)]) and len(figure.axes[0].patches) == 1
    two = figures.mask_figure({"m": torch.tensor([[NAN, 1.0]]), "n": torch.tensor([[-math.inf, 1.0]])})
    assert [text.get_text() for text in two.legends[0].get_texts()] == ["hidden (-inf)", "NaN"]
    assert figure.alt_text.endswith("m: of 4 entries, 1 numbers, 1 hidden (-inf), 1 NaN, 1 +inf.")


def test_a_mask_figure_has_a_colour_bar_only_where_there_are_numbers():
    lost, some = torch.tensor([[NAN, -math.inf]]), torch.tensor([[1.0, -math.inf]])
    assert [len(figures.mask_figure({"m": table}).axes) for table in (lost, some)] == [1, 2]


def test_a_mask_figure_wants_one_head():
    with pytest.raises(show.ShowError, match=r"x: \[2, 4, 4\]"):
        figures.mask_figure({"x": torch.zeros(2, 4, 4)})


def test_figures_draw_without_a_warning_and_show_themselves_once_with_their_words():
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import display
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    deep = show.diff_figure({"broken": make_report({"layers.5.attn": NAN}, layers=30), "fixed": make_report(layers=30)})
    for figure in (deep, show.points_figure({"a": make_report(NAN_FROM_START), "b": make_report()}),
                   figures.mask_figure({"x": torch.zeros(3, 3)}, tokens=["a", "b", "c"])):
        with warnings.catch_warnings(), capture_output() as shown:
            warnings.simplefilter("error")
            display(figure)
        (output,) = shown.outputs
        assert set(output.data) == {"image/png", "text/plain"} and "0x" not in output.data["text/plain"]
        assert output.metadata["image/png"]["alt"] == figure.alt_text.removeprefix("Figure: ")
        assert " ".join(shown.stdout.split()) == figure.alt_text and max(map(len, shown.stdout.splitlines())) <= 100


def test_nothing_to_describe():
    with pytest.raises(show.ShowError, match="nothing to describe in int"):
        show.describe(3)


def test_the_title_names_the_first_that_is_wrong_and_the_last_that_is_right():
    reports = {"one": make_report({"layers.0.attn": NAN}), "two": make_report({"layers.1.q": 1.0}),
               "three": make_report(), "four": make_report(), "five": make_report({"layers.2.q": 1.0})}
    assert show.diff_figure(reports).get_suptitle() == "“one” leaves the floor at layers.0.attn; “four” never does"


def test_every_layer_is_named_below_its_own_point():
    ax = show.diff_figure({"fixed": make_report(layers=3)}).axes[0]
    named = {int(at): label.get_text() for at, label in zip(ax.get_xticks(), ax.get_xticklabels())}
    assert named == {0: "embed", 1: "0", 2: "1", 3: "2", 4: "norm", 5: "logits"}


def test_heat_maps_share_one_scale_and_hatch_what_is_hidden_and_nothing_else():
    scores = torch.arange(16.0).reshape(4, 4)
    figure = figures.mask_figure({"a": scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf), "b": 2 * scores})
    hidden = {(round(patch.get_x() + 0.5), round(patch.get_y() + 0.5)) for patch in figure.axes[0].patches}
    assert hidden == {(k, q) for q in range(4) for k in range(4) if k > q} and not figure.axes[1].patches
    assert [ax.images[0].get_clim() for ax in figure.axes[:2]] == [(0.0, 30.0)] * 2
    assert figure.get_suptitle() == "No NaN: what is not hidden is a number"
    lost = figures.mask_figure({"a": scores, "b": scores.masked_fill(scores > 12, NAN)})
    assert lost.get_suptitle() == "“b” turns 3 of 16 entries into NaN"
