"""A learner's function on ranks: what each returned and sent, or at most three lines about what went wrong."""

import pytest
from helpers.answers import defined

from course.judge.attempt import Attempt, NotYet, count_ops, on_ranks
from tplab.pool import shared_pool

pytestmark = pytest.mark.pool


def ask(code, ranks, waits=""):
    return on_ranks(ranks, Attempt(defined(code, "f"), "n"), 3, waits=waits)


def refused(code, ranks, waits=""):
    with pytest.raises(NotYet) as caught:
        ask(code, ranks, waits)
    assert str(caught.value).count("\n") <= 2
    return str(caught.value)


@pytest.fixture(params=["logical", "pool"])
def ranks(request):
    return 2 if request.param == "logical" else shared_pool(2)


def test_what_each_rank_returns_and_the_collectives_of_this_call_alone(ranks):
    code = "def f(n): return all_reduce(torch.full((n,), float(rank()))).tolist()"
    for _ in range(2):
        answers = ask(code, ranks)
        assert [value for value, _ in answers] == [[1.0] * 3] * 2
        assert [[str(op) for op in ops] for _, ops in answers] == [["all_reduce [3] float32"]] * 2


def test_as_many_logical_ranks_as_are_asked_for():
    assert [value for value, _ in ask("def f(n): return rank(), world_size()", 3)] == [(0, 3), (1, 3), (2, 3)]


def test_an_exception_is_said_once_with_its_line_and_its_ranks(ranks):
    everywhere = "def f(n):\n    return 1 / (n - 3)"
    assert refused(everywhere, ranks, "Who?") == ("on every rank: ZeroDivisionError: division by zero\n"
                                                  "at your line 2: return 1 / (n - 3)")
    on_one = "def f(n):\n    1 / rank()\n    barrier()"
    assert refused(on_one, ranks, "Who?") == ("on rank 0: ZeroDivisionError: division by zero\n"
                                              "at your line 2: 1 / rank()")


def test_a_rank_that_waits_for_ever_is_asked_about(ranks):
    said = refused("def f(n):\n    if rank() == 0:\n        barrier()", ranks, "Who?")
    assert said.startswith("rank 1 returned; rank 0 waits in barrier at ")
    assert said.endswith("at your line 3: barrier()\nWho?")


def test_an_argument_that_was_written_into_is_named():
    with pytest.raises(NotYet, match="on every rank: it returns nothing, and changes its argument n"):
        on_ranks(2, Attempt(defined("def f(n): n.append(1)", "f"), "n"), [3])


def test_collectives_are_counted():
    ran = ask("def f(n): return all_reduce(torch.ones(n))", 2)
    count_ops(ran, {"all_reduce": 1})
    with pytest.raises(NotYet, match="rank 0 of 2 calls all_reduce; 2 all_gathers must be enough"):
        count_ops(ran, {"all_gather": 2})
    with pytest.raises(NotYet, match="calls all_reduce; no collective must be enough"):
        count_ops(ran, {})
