"""How long a watch waits for which ranks: on a clock of its own, with no process at hand."""

import os
import select
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from tplab.pool import waiting
from tplab.pool import watch as watch_module
from tplab.pool.control_block import ABANDONED, ANSWER_LENGTH, ANSWERED, DROP, OK, OUTCOME, STARTED, ControlBlock
from tplab.pool.shared_file import SharedFile
from tplab.pool.transfer import dumps
from tplab.pool.watch import _DROP_GLOO, _GLOO_SAMPLE, _GLOO_STUCK, _GRACE, _STOP, _TICK, Watch
from tplab.pool.worker import Report
from tplab.ranks.errors import Frame

NUMBER = 7
GLOO = [Frame(os.path.join("torch", "distributed", "c.py"), 1, "all_reduce")]


@pytest.fixture
def scene(monkeypatch, tmp_path):
    """`play(size, events)`: a watch of so many ranks, to which at each time (s) of `events` happens what stands there.
    """
    now, memories = [0.0], []
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=lambda: 99))
    judged = []
    for judge in ("failure", "skipped", "too_late"):
        monkeypatch.setattr(watch_module.failures, judge,
                            lambda watch, judge=judge: judged.append((judge, round(now[0], 3))) or RuntimeError(judge))

    def play(size, events=(), timeout=100.0):
        now[0] = 0.0
        memories.append(SharedFile("block", str(tmp_path), ControlBlock.bytes_needed(size)))
        watch, control = object.__new__(Watch), ControlBlock(memories[-1], size)
        sent, posted = [], []
        outbox = SimpleNamespace(get=lambda length: dumps(Report("raised", "X", [], None)) if length == 5 else length)
        processes = [SimpleNamespace(rank=r, signal=lambda number, r=r: sent.append((r, number)), outbox=outbox)
                     for r in range(size)]
        pool = SimpleNamespace(size=size, _epoch=4, _post=lambda kind: posted.append((kind, round(now[0], 3))))
        vars(watch).update(
            pool=pool, control=control, processes=processes, timeout=timeout, number=NUMBER, status=["running"] * size,
            reports=[None] * size, died_at=[0] * size, ended=set(), before=[0] * size, _gone=set(), _gloo_since={},
            waiting={}, sent=sent, posted=posted, judged=judged, stacks={}, pauses=[])
        watch.waits_in = lambda r: watch.waiting.get(r)
        to_come = sorted(dict(events).items())

        def pause(seconds):
            watch.pauses.append(seconds)
            now[0] += max(0.0, seconds)
            while to_come and to_come[0][0] <= now[0] + 1e-9:
                to_come.pop(0)[1](watch)

        watch._pause = pause
        pause(0)
        return watch

    yield play
    memories.clear()


def answers(r, outcome=OK, length=0, number=NUMBER):
    def event(watch):
        watch.control.set_word(r, OUTCOME, outcome)
        watch.control.set_word(r, ANSWER_LENGTH, length)
        watch.control.set_word(r, ANSWERED, number)
        watch.waiting.pop(r, None)
    return event


def fails(r):
    return answers(r, outcome=OK + 1, length=5)


def dies(r):
    return lambda watch: watch._gone.add(r)


def waits(r, seq=1):
    return lambda watch: watch.waiting.update({r: SimpleNamespace(seq=seq)})


def both(*events):
    return lambda watch: [event(watch) for event in events]


def verdict(watch):
    with pytest.raises(RuntimeError):
        watch.results()
    return watch.judged[-1]


def test_all_answer(scene):
    watch = scene(2, {0.1: answers(1, length=11), 0.3: answers(0, length=10), 0.0: answers(0, number=NUMBER - 1)})
    assert watch.results() == [10, 11] and watch.judged == [] and 0 < max(watch.pauses) <= _TICK


@pytest.mark.parametrize("first", [fails, dies])
def test_after_a_first_failure_the_others_are_given_a_moment(scene, first):
    kind, at = verdict(scene(2, {0.1: first(1)}))  # the other one computes
    assert kind == "failure" and 0.1 + _GRACE <= at <= 0.1 + _GRACE + 2 * _TICK
    assert verdict(scene(2, {0.0: both(first(1), waits(0))})) == ("failure", 0.0)  # and here it waits for the first
    assert verdict(scene(3, {0.1: both(first(1), waits(0))})) == ("failure", at)  # here a third one computes
    kind, at = verdict(watch := scene(2, {0.0: first(0), 0.1: answers(1)}))
    assert kind == "failure" and watch.status[1] == "returned"
    assert (watch.reports[0].text == "X") if first is fails else watch.died_at == [99, 0]


def test_an_answer_counts_though_its_rank_has_died(scene):
    watch = scene(2, {0.0: both(answers(0), answers(1), dies(1))})
    assert watch.results() == [0, 0] and watch.status == ["returned"] * 2


def test_a_rank_waits_for_one_that_has_returned(scene):
    watch = scene(2, {0.0: both(answers(0), waits(1))})
    assert verdict(watch) == ("skipped", 0.0)
    kind, at = verdict(scene(3, {0.0: both(answers(0), waits(1))}))  # the third may still say where it will wait
    assert kind == "skipped" and _GRACE <= at <= _GRACE + 2 * _TICK


def test_the_last_one_says_where_it_will_wait(scene):
    kind, at = verdict(scene(3, {0.0: both(answers(0), waits(1)), 0.05: waits(2)}))
    assert kind == "skipped" and at <= 0.05 + 2 * _TICK < _GRACE


def test_a_rank_waits_for_ranks_that_are_on_their_way(scene):
    watch = scene(3, {0.0: waits(1), 0.5: both(waits(0), waits(2)), 0.6: both(*map(answers, range(3)))})
    assert watch.results() == [0] * 3


@pytest.mark.parametrize("timeout", [0.01, 0.12, 3.0])
def test_the_time_is_up(scene, timeout):
    kind, at = verdict(scene(2, timeout=timeout))
    assert kind == "too_late" and timeout <= at <= timeout + 0.001


def test_ranks_that_hang_in_gloo_are_looked_for_now_and_then(scene, monkeypatch):
    looks = []
    monkeypatch.setattr(watch_module, "snapshot", lambda processes: looks.append([p.rank for p in processes]) or {
        p.rank: GLOO for p in processes})
    kind, at = verdict(scene(2, {0.0: answers(0)}))
    assert kind == "skipped" and _GLOO_SAMPLE + _GLOO_STUCK <= at <= _GLOO_SAMPLE + _GLOO_STUCK + 6 * _TICK * 2
    assert set(map(tuple, looks)) == {(1,)} and len(looks) <= 2 + _GLOO_STUCK / _GLOO_SAMPLE
    looks.clear()
    assert verdict(scene(2, timeout=9.0))[0] == "too_late" and not looks  # no rank has returned: all may be at work


def test_ranks_are_brought_to_rest(scene, monkeypatch):
    killed = []
    monkeypatch.setattr(watch_module, "end_all", lambda processes: killed.append([p.rank for p in processes]))

    def starts(r, number):
        return lambda watch: watch.control.set_word(r, STARTED, number)

    watch = scene(5, {0.0: both(answers(0), starts(3, NUMBER)), 0.02: fails(1),
                      0.1: both(starts(2, NUMBER + 1), dies(4))})
    watch.stop()
    assert watch.control.words[ABANDONED] == 4
    assert watch.sent == [(r, signal.SIGUSR1) for r in (1, 2, 3, 4)]  # the first one had answered before
    (kind, at), = watch.posted
    assert kind == DROP and _DROP_GLOO <= at < _DROP_GLOO + 0.03
    assert watch.status == ["returned", "failed", "idle", "dead", "dead"] and watch.ended == {3} and killed == [[3]]
    assert _STOP <= sum(watch.pauses) < _STOP + 0.05 and max(watch.pauses) <= 0.01
    watch = scene(1, {0.0: answers(0)})
    watch.stop()
    assert (watch.sent, watch.posted, killed[-1], watch.pauses) == ([], [], [], [0])


def test_what_a_pause_hears():
    """A byte wakes it, an end is noted once, and a flood of prints is kept short in the meantime."""
    (wake, waker), (sentinel, process) = os.pipe(), os.pipe()
    trims, watch = [], object.__new__(Watch)

    def drain():
        return bool(os.read(wake, 4096))

    one = SimpleNamespace(rank=3, drain=drain, reader=SimpleNamespace(trim=lambda: trims.append(1)))
    watch.processes, watch._gone, watch._poll = [one], set(), select.poll()
    watch._pipes, watch._sentinels = {wake: one}, {sentinel: one}
    for fd in (wake, sentinel):
        watch._poll.register(fd, select.POLLIN)
    os.write(waker, b"aaa")
    watch._pause(60)
    watch._pause(-1)
    assert not watch._gone and len(trims) == 2
    os.close(waker)
    watch._pause(60)
    os.close(process)
    watch._pause(60)
    assert watch._gone == {3}
    assert watch._poll.poll(0) == []  # what has ended stays readable for ever
    os.close(wake)
    os.close(sentinel)


@pytest.mark.skipif(not waiting._syscall, reason="without a futex a rank naps")
@pytest.mark.parametrize("word", [0, 5, 1 << 16, (1 << 32) + 7])
def test_a_sleep_lasts_while_the_word_is_the_same(word):
    place = torch.tensor([word])
    for seen, least in ((word, 0.02), (word + 1, 0)):
        begin = time.monotonic()
        waiting.sleep_while(place.data_ptr(), seen, 0.03)
        assert time.monotonic() - begin >= least
    begin = time.monotonic()
    waiting.sleep_while(place.data_ptr(), word ^ 1 << 16, 30)
    assert time.monotonic() - begin < 20, "the word had another value"
