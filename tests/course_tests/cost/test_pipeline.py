"""A product in parts beside its sums, on a simulated clock."""

import pytest

from course.cost.pipeline import overlap_on_links, pipeline


@pytest.mark.parametrize("product, latency, transfer", [(4, 0.1, 3.9), (4, 1, 3), (1, 0.5, 9), (9, 0.5, 1)])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_the_first_product_and_the_last_sum_overlap_with_nothing(product, latency, transfer, parts):
    steps = pipeline(product, latency, transfer, parts)
    one, its_sum = product / parts, latency + transfer / parts
    assert steps[-1][-1] == pytest.approx(one + (parts - 1) * max(one, its_sum) + its_sum)
    for (start, begin, end), following in zip(steps, steps[1:]):
        assert following[0] == pytest.approx(start + one), "a rank computes one product after the other"
        assert begin >= start + one - 1e-9, "a sum starts when its product is ready"
        assert following[1] >= end - 1e-9, "a link does one sum at a time"


def test_the_links_have_a_row_each_and_a_slower_link_a_longer_sum():
    rows = overlap_on_links(2048, 8192, 28672, 8, (1, 4))
    assert [row["link"] for row in rows] == ["nvlink", "pcie", "ethernet"]
    sums = [int(row["sum"].partition(" ")[0].replace(",", "")) for row in rows]
    assert sums == sorted(sums) and len({row["product"] for row in rows}) == 1
    assert {"in 1 part", "in 4 parts"} <= set(rows[0])
