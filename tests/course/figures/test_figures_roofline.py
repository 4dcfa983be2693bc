"""The roofline: points where they belong, roofs with a slope and a ceiling, words without a number of the machine."""

import numpy as np
import pytest

from course import figures
from tplab import show

POINTS, ROOFS = {"decode": (0.5, 4e9), "prompt": (200.0, 9e10)}, {"1 rank": (1e10, 1e11)}


def test_a_roof_is_a_slope_and_then_a_ceiling():
    ax = figures.roofline_figure(POINTS, ROOFS).axes[0]
    roof, decode, prompt = ax.get_lines()
    x, y = roof.get_xdata(), roof.get_ydata()
    assert np.allclose(y, np.minimum(1e10 * x, 1e11)) and x[0] == pytest.approx(0.5 / 3) and x[-1] == pytest.approx(600)
    wide = figures.roofline_figure({"a": (1.0, 1.0)}, {"1 rank": (1e10, 1e11), "2 ranks": (1e10, 1e9)}).axes[0]
    roofs = wide.get_lines()[:2]
    assert [(line.get_xdata()[0], line.get_xdata()[-1]) for line in roofs] == [pytest.approx((0.1 / 3, 30))] * 2
    assert [line.get_linestyle() for line in roofs] == ["-", "--"] and wide.get_xscale() == wide.get_yscale() == "log"
    assert [line.get_label() for line in wide.get_lines()] == [
        "1 rank: 10 GB/s, 100 Gflop/s", "2 ranks: 10 GB/s, 1 Gflop/s", "a"]
    assert (wide.get_xlabel(), wide.get_ylabel()) == ("operations per byte that must be read", "operations per second")
    assert decode.get_xydata().tolist() == [[0.5, 4e9]]
    assert prompt.get_xydata().tolist() == [[200.0, 9e10]]
    assert len({line.get_color() for line in (roof, decode, prompt)}) == 3


def test_the_words_are_the_same_on_another_machine():
    faster = {label: (x, 9 * y) for label, (x, y) in POINTS.items()}
    words = {figures.roofline_figure(points, {"1 rank": roof}).alt_text
             for points, roof in ((POINTS, (1e10, 1e11)), (faster, (2e10, 3e11)))}
    assert len(words) == 1 and "Points: decode, prompt." in words.pop()


@pytest.mark.parametrize("points, roofs", [({}, ROOFS), (POINTS, {}), ({"a": (0.0, 1.0)}, ROOFS)])
def test_what_cannot_be_drawn_on_log_axes_is_refused(points, roofs):
    with pytest.raises(show.ShowError, match="above 0"):
        figures.roofline_figure(points, roofs)


def test_a_folded_table_opens_with_its_summary():
    bundle = show.table([{"a": 1, "b": 2}], "a", "What <was> seen")._repr_mimebundle_()
    assert bundle["text/html"].startswith("<details><summary>What &lt;was&gt; seen</summary><table>")
    assert bundle["text/plain"] == str(show.table([{"a": 1, "b": 2}], index="a"))
