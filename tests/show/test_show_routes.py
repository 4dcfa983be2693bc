"""The figure of a router's choice: a weight in its expert's row, words below, counts in the text alternative."""

import pytest
import torch

from tplab import show

WORDS = [" the", " fox", "\n"]
ROUTE = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.6, 0.4]]), torch.tensor([[2, 0], [2, 3], [0, 2]])


def test_each_weight_stands_in_its_experts_row():
    figure = show.routes_figure({"layer 0": ROUTE, "layer 5": ROUTE}, WORDS, 4, "Expert 2 is asked by all")
    ax, last = figure.axes
    table = torch.tensor(ax.get_images()[0].get_array().data)
    assert table.allclose(torch.tensor([[0.3, 0, 0.6], [0, 0, 0], [0.7, 0.9, 0.4], [0, 0.1, 0]]))
    assert [label.get_text() for label in last.get_xticklabels()] == ["the", "fox", "␣"]
    assert ax.get_ylabel() == "layer 0\nexpert"
    assert figure.alt_text.endswith("experts 0 to 3 in layer 0: 2, 0, 3, 1; layer 5: 2, 0, 3, 1.")


@pytest.mark.parametrize("routes", [{}, {"layer 0": (ROUTE[0][:2], ROUTE[1][:2])}])
def test_routes_without_a_row_for_each_word_are_refused(routes):
    with pytest.raises(show.ShowError, match="with a row for each word"):
        show.routes_figure(routes, WORDS, 4, "")
