"""The op logs of a failed run as a picture: the first difference, who waits for whom, and words without a line number.
"""

import pytest
import torch
from matplotlib.colors import to_hex

from course import figures, lesson
from tplab import show
from tplab.ranks import CollectiveMismatch, RankError
from tplab.ranks.errors import Cause
from tplab.ranks.oplog import OpRecord


def call(seq, op="all_reduce", shape=(4,), left=True, line=7):
    return OpRecord(seq, op, shape, "float32", 0, "cell.py", line, left)


def waits(rank):
    return Cause(rank, "waiting", "waits in all_reduce at cell In[3], line 9", consequence=True)


def died(rank):
    return Cause(rank, "died", "died (SIGKILL) after all_reduce at cell In[3], line 2")


def arrows(figure):
    return [patch for ax in figure.axes for patch in ax.patches if type(patch).__name__ == "ConnectionPatch"]


def test_a_rank_that_waits_points_at_the_one_that_does_not_come():
    error = RankError("x", [died(1), waits(0)], [[call(1), call(2, left=False)], [call(1)]])
    figure = figures.op_logs(error)
    assert figure.alt_text == ("Figure: the collectives of each rank, in order. 1 agrees, then rank 0 waits in "
                               "all_reduce [4] float32; rank 1 died (SIGKILL).")
    (arrow,) = arrows(figure)
    assert arrow.xy1[0] < arrow.xy2[0]  # from rank 0 to rank 1
    marks = [text.get_text() for text in figure.axes[0].texts]
    assert "≠ #2" in marks and "#1" in marks


def test_a_rank_of_which_nothing_is_known_has_its_collectives_alone():
    figure = figures.op_logs(RankError("x", [died(1)], [[call(1)], [call(1)]]))
    assert figure.alt_text.endswith("in order. rank 1 died (SIGKILL).")


def test_of_several_that_wait_each_points_at_the_nearest_absent_one():
    logs = [[call(1, left=False)], [], [call(1, left=False)], [call(1, left=False)]]
    figure = figures.op_logs(RankError("x", [Cause(1, "returned", "returned"), waits(0), waits(2), waits(3)], logs))
    assert sorted(round(arrow.xy2[0]) for arrow in arrows(figure)) == [1, 1, 1]
    assert "rank 1 returned; rank 2 waits in" in figure.alt_text


def test_of_two_absent_ranks_the_nearer_one_is_pointed_at():
    """From the side at which it stands."""
    logs = [[], [], [], [call(1, left=False)], []]
    causes = [waits(3), *(Cause(r, "returned", "returned") for r in (0, 1, 2, 4))]
    (arrow,) = arrows(figures.op_logs(RankError("x", causes, logs)))
    assert (arrow.xy1, arrow.xy2) == ((2.57, 0), (2.43, 0))
    logs[2] = [call(1, left=False)]
    first, second = arrows(figures.op_logs(RankError("x", [waits(2), *causes], logs)))
    assert (first.xy2, second.xy2) == ((1.43, 0), (3.57, 0))


def test_ranks_that_meet_in_different_collectives_call_and_do_not_wait():
    records = [call(1, left=False), call(1, shape=(5,), left=False)]
    error = CollectiveMismatch("x", CollectiveMismatch.of(records).causes.values(), [[r] for r in records])
    figure = figures.op_logs({"another shape": error})
    assert not arrows(figure)
    assert "another shape: rank 0 calls all_reduce [4] float32; rank 1 calls all_reduce [5] float32" in figure.alt_text


def test_only_the_rows_before_the_difference_are_drawn():
    long = [call(n) for n in range(1, 40)]
    figure = figures.op_logs(RankError("x", [waits(0), died(1)], [[*long, call(40, left=False)], long]))
    numbers = [text.get_text() for text in figure.axes[0].texts if "#" in text.get_text()]
    assert numbers == ["#38", "#39", "≠ #40"]


def test_a_rank_in_a_loop_without_any_collective():
    causes = [Cause(0, "waiting", "waits in dist.all_reduce at a.py, line 3"),
              Cause(1, "running", "is still running at a.py, line 4")]
    figure = figures.op_logs(RankError("x", causes, [[call(1)], [call(1)]]))
    assert "rank 0 waits in dist.all_reduce; rank 1 is still running" in figure.alt_text
    assert "line" not in figure.alt_text


def test_the_logs_of_an_error_that_ranks_caused_are_found():
    outer = ValueError("the engine's own")
    outer.__cause__ = RankError("x", [waits(0), died(1)], [[call(1, left=False)], []])
    assert "rank 1 died (SIGKILL)" in figures.op_logs(outer).alt_text


@pytest.mark.parametrize("wrong", [{}, ValueError("none"), RankError("refused: no run"), None])
def test_errors_without_op_logs_are_refused(wrong):
    with pytest.raises(show.ShowError):
        figures.op_logs(wrong)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_six_panels_fit_for_any_number_of_ranks(ranks):
    causes = [waits(0), *(Cause(r, "returned", "returned") for r in range(1, ranks))]
    errors = {f"failure {n}": RankError("x", causes, [[call(1, left=False)], *[[]] * (ranks - 1)]) for n in range(6)}
    figure = figures.op_logs(errors)
    width, height = figure.get_size_inches()
    one = figures.op_logs(errors["failure 0"]).get_size_inches()
    assert one[0] == max(7.0, 1.75 * ranks + 0.6) and one[1] < height, "a single one is no wider than it must be"
    assert width < 13 and sum(bool(ax.texts) for ax in figure.axes) == 6
    assert figure.png().startswith(b"\x89PNG")


def test_the_error_of_real_ranks():
    from tplab.ranks import all_reduce, logical_ranks, rank

    def skips():
        all_reduce(torch.ones(2))
        if rank() == 0:
            all_reduce(torch.ones(3))

    assert figures.op_logs(lesson.caught(logical_ranks, 2, skips)).alt_text.endswith(
        "1 agrees, then rank 0 waits in all_reduce [3] float32; rank 1 returned.")


def test_boxes_say_by_their_colour_which_ranks_met_wait_and_cannot():
    def looks(figure):
        boxes = [patch for patch in figure.axes[0].patches if type(patch).__name__ == "FancyBboxPatch"]
        return [(to_hex(box.get_edgecolor()), box.get_hatch()) for box in boxes]

    waiting = RankError("x", [died(1), waits(0)], [[call(1), call(2, left=False)], [call(1)]])
    green, orange, red = ("#009e73", None), ("#e69f00", "////"), ("#d55e00", None)
    assert looks(figures.op_logs(waiting)) == [green, green, orange, red]
    records = [call(1, left=False), call(1, shape=(5,), left=False)]
    apart = CollectiveMismatch("x", CollectiveMismatch.of(records).causes.values(), [[r] for r in records])
    assert looks(figures.op_logs(apart)) == [red, red]
    late = CollectiveMismatch("x", CollectiveMismatch.of(records).causes.values(), [[call(1), r] for r in (
        call(2, left=False), call(2, shape=(5,), left=False))])
    assert looks(figures.op_logs(late)) == [green, green, red, red], "what they met in is right"
