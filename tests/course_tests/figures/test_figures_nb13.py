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


def test_the_pictures_say_what_they_draw():
    assert "latency 1 ms, 2 parts: 7.0 ms" in figures.overlap_figure(4, 4, (0.1, 1), (1, 2), 2, "t").alt_text
    assert "After 3 messages rank r holds the whole sum" in figures.ring_figure(4, "t").alt_text
    assert "(3, 4 of 7)" in figures.regions_figure([3, 4], "t").alt_text
