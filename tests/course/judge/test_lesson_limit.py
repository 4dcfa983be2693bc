"""No answer hangs: loops, sleeps and waits are ended and said, with the line; what an answer has set is put back."""

import signal
import threading
from functools import partial

import pytest
import torch
from helpers.answers import defined
from helpers.answers.other_kinds import looping

from course import lesson
from course.judge import attempt, limit
from course.judge.attempt import Attempt, NotYet, on_ranks
from course.judge.limit import limited

LOOPS = {
    "loop": ("while True: pass", 2), "sleep": ("__import__('time').sleep(1e6)", 2),
    "deaf": ("while True:\n        try: n += 0\n        except: n += 0", 3),
    "state": ("while state.get('go') is None: n += 0", 2)}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(limit, "LIMIT", 0.5)
    monkeypatch.setattr(attempt, "LIMIT", 0.5)


def f(body, head="def f(n):"):
    return Attempt(defined(f"from tplab.ranks import state\n{head}\n    {body}\n", "f"), "n")


def refused(call, *args):
    with pytest.raises(NotYet) as caught:
        call(*args)
    return str(caught.value)


def gone(name):
    """Waits until no thread of that name is left but those that were there."""
    for thread in threading.enumerate():
        if thread.name.startswith(name) and thread not in asleep:
            thread.join(60)
            assert not thread.is_alive()


asleep = set()


@pytest.mark.parametrize("kind", LOOPS)
def test_what_does_not_end_in_the_cells_own_thread_is_ended(kind):
    body, _ = LOOPS[kind]
    said = refused(limited, f(body), 3)
    assert said.startswith("not finished after 0.5 s: it is still at your line ") and said.endswith("\nWhat ends it?")
    gone("limit")


def test_where_interrupts_are_ignored_a_loop_ends_too():
    """A shell starts its background processes so."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert refused(limited, f("while True: pass"), 3).startswith("not finished after 0.5 s")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", LOOPS)
def test_what_does_not_end_on_one_rank_is_ended_and_the_others_are_told(kind):
    body, line = LOOPS[kind]
    head = "def f(n):\n    if rank() == 0: return barrier()"
    said = refused(limited, partial(on_ranks, waits="Who?"), 2, f(body, head), 3)
    assert said.startswith("not finished after 0.5 s: rank 1 is still at your line ")
    assert "; rank 0 waits in barrier at " in said.splitlines()[0]
    assert said.endswith("\nWho?")
    if kind == "sleep":
        asleep.update(thread for thread in threading.enumerate() if thread.name.startswith("logical rank"))
    gone("logical rank")


def test_a_rank_that_fails_is_the_cause_though_another_one_loops():
    said = refused(on_ranks, 2, f("while True: pass", "def f(n):\n    if rank() == 0: return 1 / 0"), 3)
    assert said.startswith("on rank 0: ZeroDivisionError: division by zero")


def test_many_short_calls_may_take_longer_than_one():
    assert limited(list, map(f("__import__('time').sleep(0.06); return n"), [3] * 12)) == [3] * 12


def test_work_of_the_labs_that_is_waited_for_does_not_count():
    step = defined("def f(step): return [step() for _ in range(12)]", "f")
    wait = threading.Event().wait

    def work():
        limit.progress()
        wait(0.06)

    assert limited(step, work) == [None] * 12


def test_an_interrupt_is_passed_on_and_ends_the_ranks():
    def interrupt(n):
        if mine_rank() == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:
            n += 0

    from tplab.ranks import rank as mine_rank
    with pytest.raises(KeyboardInterrupt):
        limited(on_ranks, 2, interrupt, 3)
    gone("logical rank")


def test_away_from_the_main_thread_a_loop_ends_too():
    said = []
    thread = threading.Thread(target=lambda: said.append(refused(limited, f("while True: pass"), 3)))
    thread.start()
    thread.join(60)
    assert said and said[0].startswith("not finished after 0.5 s")


@pytest.mark.parametrize("ranks", [None, 2])
def test_what_an_answer_sets_is_put_back(ranks):
    before = torch.get_default_dtype(), torch.get_num_threads()
    sets = f("torch.set_default_dtype(torch.float64); torch.set_num_threads(3); return n")
    assert sets(3) == 3 if ranks is None else [one for one, _ in on_ranks(ranks, sets, 3)] == [3, 3]
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before
    with pytest.raises(NotYet):
        f("torch.set_default_dtype(torch.float64); 1 / 0")(3)
    assert torch.get_default_dtype() == before[0]


@pytest.mark.parametrize("name", looping)
def test_an_endless_answer_to_every_exercise_gets_a_verdict(name, capsys, monkeypatch):
    monkeypatch.setattr(limit, "LIMIT", 0.2)
    monkeypatch.setattr(attempt, "LIMIT", 0.2)
    assert not lesson.judge(defined(looping[name], name), "fable", [5, 6, 7], name=name).passed
    assert "not finished after 0.2 s:" in capsys.readouterr().out
    gone("logical rank")
