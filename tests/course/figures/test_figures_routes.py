"""Who chooses which expert, and who holds it: each weight in its row, each part in its rank's colour."""

import xml.etree.ElementTree as ET
from collections import Counter

import pytest
import torch

from course import figures
from tplab import ShardPlan, show
from tplab.show.drawings.svg import colour

WORDS = [" the", " fox", "\n"]
ROUTE = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.6, 0.4]]), torch.tensor([[2, 0], [2, 3], [0, 2]])


def test_each_weight_stands_in_its_experts_row():
    figure = figures.routes_figure({"layer 0": ROUTE, "layer 5": ROUTE}, WORDS, 4, "Expert 2 is asked by all")
    ax, last = figure.axes
    table = torch.tensor(ax.get_images()[0].get_array().data)
    none = float("nan")  # what is not chosen has no colour
    assert table.allclose(torch.tensor([[0.3, none, 0.6], [none] * 3, [0.7, 0.9, 0.4], [none, 0.1, none]]),
                          equal_nan=True)
    assert [label.get_text() for label in last.get_xticklabels()] == ["the", "fox", "␣"]
    assert ax.get_ylabel() == "layer 0\nexpert"
    assert figure.alt_text.endswith("experts 0 to 3 in layer 0: 2, 0, 3, 1; layer 5: 2, 0, 3, 1.")


@pytest.mark.parametrize("routes", [{}, {"layer 0": (ROUTE[0][:2], ROUTE[1][:2])}])
def test_routes_without_a_row_for_each_word_are_refused(routes):
    with pytest.raises(show.ShowError, match="with a row for each word"):
        figures.routes_figure(routes, WORDS, 4, "")


def plans(ranks, experts=8):
    sizes = dict(num_heads=8, num_kv_heads=8, head_dim=4, hidden_size=32, intermediate_size=0, vocab_size=40,
                 num_experts=experts, expert_intermediate_size=10 if experts else 0)
    return {f"{whole}": ShardPlan.make(tensor_parallel_size=ranks, enable_expert_parallel=whole, **sizes)
            for whole in (False, True)} if experts else {"dense": ShardPlan.make(
                tensor_parallel_size=ranks, **sizes | {"intermediate_size": 16})}


def test_every_part_of_an_expert_is_drawn_once_in_its_ranks_colour():
    drawing = figures.experts_figure(plans(3))
    boxes = [node for node in ET.fromstring(drawing.svg).iter("{http://www.w3.org/2000/svg}rect") if len(node)]
    held = Counter((node.find("{http://www.w3.org/2000/svg}title").text, node.get("fill")) for node in boxes)
    assert held == {(f"rank {rank}", colour(rank)[0]): 8 + whole for rank, whole in enumerate((3, 3, 2))}
    cut = [float(node.get("height")) for node in boxes[:24]]
    assert cut == pytest.approx([56 * part / 10 for part in (4, 3, 3) for _ in range(8)])
    assert {float(node.get("height")) for node in boxes[24:]} == {56}
    assert drawing.alt_text.endswith("True: rank 0 3 experts (0–2); rank 1 3 experts (3–5); rank 2 2 experts (6–7).")


@pytest.mark.parametrize("given", [{}, plans(2, experts=0)])
def test_plans_without_experts_are_refused(given):
    with pytest.raises(show.ShowError, match="of plans with experts"):
        figures.experts_figure(given)
