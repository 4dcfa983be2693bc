"""Notebook 13's pictures: what they say is what they draw."""

from course import figures
from course.figures.nb13 import ring


def test_after_half_of_the_messages_each_rank_has_the_sum_of_its_rows_and_after_all_of_them_every_rank_all_rows():
    for ranks in (2, 3, 4):
        states, everybody = ring(ranks), frozenset(range(ranks))
        assert len(states) == 2 * (ranks - 1) + 1
        half = states[ranks - 1]
        assert all(half[rank][rows] == everybody for rank in range(ranks) for rows in range(ranks) if rows == rank)
        assert any(half[rank][rows] != everybody for rank in range(ranks) for rows in range(ranks))
        assert all(summands == everybody for rank in states[-1] for summands in rank)
        for before, after in zip(states, states[1:]):  # a message goes to the next rank only, one field of each
            changed = [sum(a != b for a, b in zip(*pair)) for pair in zip(before, after)]
            assert changed == [1] * ranks


def test_a_ring_as_a_table_and_what_the_picture_says():
    rows = figures.ring_rows(2)
    assert [row["after"] for row in rows] == ["the start", "reduce-scatter 1", "all-gather 1"]
    assert [(row["rank 0"], row["rank 1"]) for row in rows] == [
        ("0 | 0", "1 | 1"), ("0+1 | 0", "1 | 0+1"), ("0+1 | 0+1", "0+1 | 0+1")]
    assert "latency 1 ms, 2 parts: 7.0 ms" in figures.overlap_figure(4, 4, (0.1, 1), (1, 2), 2, "t").alt_text
