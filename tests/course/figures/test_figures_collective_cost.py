"""The price of a collective: the figure's lines are the medians, and its words hold nothing of the machine."""

import numpy as np
import pytest

from course import figures
from course.figures.collective_cost import latency_and_bandwidth
from tplab import show

MEASURED = {"shared": {4: [1e-5, 3e-5, 2e-5], 1 << 20: [1e-3, 1.02e-3, 3e-3]},
            "gloo": {4: [1e-4] * 3, 1 << 20: [2e-3] * 3}}


def test_latency_is_the_smallest_median_and_bandwidth_the_rest_of_the_largest():
    latency, bandwidth = latency_and_bandwidth(MEASURED["shared"])
    assert latency == 2e-5
    assert bandwidth == pytest.approx((1 << 20) / 1e-3)


def test_the_lines_are_medians_and_the_bands_the_middle_half():
    figure = figures.collective_cost_figure(MEASURED)
    shared = figure.axes[0].get_lines()[0]
    assert shared.get_xdata().tolist() == [4, 1 << 20] and shared.get_ydata().tolist() == [2e-5, 1.02e-3]
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("log", "log")
    assert band.max() > 1.5e-3 and band.min() == pytest.approx(np.quantile([1e-5, 3e-5, 2e-5], 0.25))


def test_the_legend_has_microseconds_and_gigabytes_per_second():
    assert [text.get_text() for text in figures.collective_cost_figure(MEASURED).legends[0].get_texts()] == [
        "shared: 20 µs for small messages, then 1.0 GB/s", "gloo: 100 µs for small messages, then 0.6 GB/s"]
    assert latency_and_bandwidth({4: [1.0], 8: [1.0]}) == (1.0, pytest.approx(8e9)), "no slower than the first one"


def test_the_words_are_the_same_on_a_slower_machine():
    slower = {label: {size: [9 * s
                             for s in seconds] for size, seconds in line.items()} for label, line in MEASURED.items()}
    one, two = (figures.collective_cost_figure(measured, {"one token": 512}).alt_text
                for measured in (MEASURED, slower))
    assert one == two and "4 B to 1 MB" in one and "one token: 512 B" in one


@pytest.mark.parametrize("wrong", [{}, {"one": {4: [1.0]}}])
def test_too_little_is_refused(wrong):
    with pytest.raises(show.ShowError):
        figures.collective_cost_figure(wrong)


@pytest.mark.parametrize("count, words",
                         [(4, "4 B"), (1023, "1.02e+03 B"), (1024, "1 KB"), (1536, "1.5 KB"), (4 << 20, "4 MB")])
def test_bytes_in_words(count, words):
    assert figures.format_bytes(count) == words


def test_threads_are_drawn_as_ratios_and_told_without_them():
    figure = figures.threads_figure({1: [1.0, 2.0, 3.0], 2: [4.0, 6.0, 8.0]}, ranks=2, cores=2)
    assert [text.get_text() for text in figure.axes[0].texts] == ["× 3"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["2 ranks × 1 thread",
                                                                                "2 ranks × 2 threads"]
    assert figure.alt_text == figures.threads_figure({1: [1.0] * 3, 8: [0.5] * 3}, ranks=2, cores=4).alt_text
    with pytest.raises(show.ShowError):
        figures.threads_figure({1: [1.0]}, ranks=2, cores=2)
