"""What a pool tells its ranks, and when: with processes and a watch that only take notes."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from tplab import patch
from tplab.pool import pool as pool_module
from tplab.pool.control_block import ANSWERED, BIRTH, JOIN, PRINTED, RUN, SETUP
from tplab.pool.pool import RankPool
from tplab.pool.shared_file import SharedFile
from tplab.pool.transfer import dumps, loads
from tplab.ranks import RankError

NAMES = {JOIN: "join", SETUP: "set up", RUN: "run"}


@pytest.fixture
def notes(monkeypatch, tmp_path):
    """Everything that happens, in order; `notes.fail`: what the next watch raises."""
    notes = SimpleNamespace(seen=[], fail=None, living=set(), payloads=[])

    class Process:
        def __init__(self, pool, rank):
            self.rank, self.pool, self.child = rank, pool, None
            self.outbox = SharedFile("outbox", str(tmp_path))
            self.outbox.put(b"an answer")
            self.reader = SimpleNamespace(take=lambda printed: notes.seen.append(("take", rank, printed)) or ("", 0))

        def dead(self):
            return self.rank not in notes.living

        def start(self, pool):
            command = pool._control.command()
            notes.seen.append(("start", self.rank, NAMES[command.kind], pool._control.word(self.rank, BIRTH)))
            notes.living.add(self.rank)
            self.child = SimpleNamespace(pid=100 + self.rank)

        def wake(self):
            assert self.rank in notes.living
            notes.seen.append(("wake", self.rank))

        def disown(self):
            pass

        def release(self):
            self.outbox.close()
            notes.seen.append(("release", self.rank))

    class Watch:
        def __init__(self, pool, before, timeout, fn, number):
            self.pool, self.number, self.given = pool, number, (before, timeout, fn)

        def results(self):
            command = self.pool._control.command()
            assert command.number == self.number
            if command.length:
                notes.payloads.append(loads(self.pool._inbox.get(command.length)))
            notes.seen.append((NAMES[command.kind], command.epoch, *self.given))
            failing, notes.fail = notes.fail, None
            if failing:
                raise failing
            return [dumps(r) for r in range(self.pool.size)]

        def stop(self):
            notes.seen.append("stop")

    def end_all(processes):
        notes.seen.append(("end", [p.rank for p in processes]))
        notes.living -= {p.rank for p in processes}

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(pool_module, "RankProcess", Process)
    monkeypatch.setattr(pool_module, "Watch", Watch)
    monkeypatch.setattr(pool_module, "end_all", end_all)
    return notes


def take(notes, *kinds):
    """What was noted since, without the wake-ups and the reading of prints unless they are asked for."""
    seen, notes.seen[:] = list(notes.seen), []
    return [note for note in seen if note[0] not in ("wake", "take") or note[0] in kinds]


NONE = (60.0, None)  # the pool's own commands have a time of their own and no function


def test_a_pool_from_its_first_command_to_its_last(notes, monkeypatch, tmp_path):
    with RankPool(2, timeout=9, strict=True) as pool:
        assert pool.strict and pool in pool_module._open_pools and pool.pids == [100, 101]
        assert take(notes, "take") == [("start", 0, "join", 1), ("start", 1, "join", 1), ("join", 1, [0, 0], *NONE),
                                       ("take", 0, 0), ("take", 1, 0), ("set up", 1, [0, 0], *NONE),
                                       ("take", 0, 0), ("take", 1, 0)]
        assert notes.payloads[-1][1] == (list(sys.path), os.getcwd())
        pool._control.set_word(1, PRINTED, 33)
        assert pool.run(max, 1, key=abs) == [0, 1]
        assert take(notes, "wake", "take") == [("wake", 0), ("wake", 1), ("run", 1, [0, 0], 9.0, max),
                                               ("take", 0, 0), ("take", 1, 33)]
        assert notes.payloads[-1] == (max, (1,), {"key": abs}, ()) and pool._control.word(1, PRINTED) == 0
        assert pool._inbox.length() == 0 == pool._processes[0].outbox.length()
        monkeypatch.chdir(tmp_path)
        pool.run(min, timeout=3)
        assert [note[0] for note in take(notes)] == ["set up", "run"]
        monkeypatch.setattr(sys, "path", [*sys.path, "/more"])
        pool.run(min)
        assert [note[0] for note in take(notes)] == ["set up", "run"] and "/more" in notes.payloads[-2][1][0]
        sys.path.append("/still more")
        pool.run(min)
        assert [note[0] for note in take(notes)] == ["set up", "run"]
        pool.run(min)
        assert [note[0] for note in take(notes)] == ["run"]
        folder = pool._folder
    assert take(notes) == [("end", [0, 1]), ("release", 0), ("release", 1)]
    assert pool.closed and not os.path.exists(folder) and pool not in pool_module._open_pools
    pool.close()
    assert take(notes) == []


def test_what_is_in_force_here_travels_with_the_call(notes):
    with RankPool(1) as pool, patch.applied(one := patch.Patch("tplab.model.attention.mask_scores", mask_scores)):
        pool.run(min)
    assert notes.payloads[-1][3] == (one,)


def mask_scores(scores, mask):
    return scores


def test_a_dead_rank_is_started_alone_and_all_begin_anew(notes):
    with RankPool(3) as pool:
        take(notes)
        notes.living.discard(1)
        pool._control.set_word(1, ANSWERED, 77)
        with open(os.path.join(pool._folder, "gloo-1"), "w"):
            pass
        assert pool.pids == [100, None, 102]
        pool.run(min)
        assert take(notes, "wake")[:4] == [("wake", 0), ("wake", 2), ("start", 1, "join", 2),
                                           ("join", 2, [0] * 3, *NONE)]
        assert os.listdir(pool._folder) == []
        assert pool._control.word(1, ANSWERED) == 0 and pool._control.word(0, BIRTH) == 1


@pytest.mark.parametrize("error", [RankError("a rank failed"), KeyboardInterrupt()], ids=["failure", "interrupt"])
def test_after_a_run_that_failed_all_begin_anew(notes, error):
    with RankPool(2) as pool:
        take(notes)
        notes.fail = error
        with pytest.raises(type(error)):
            pool.run(min)
        assert [note if note == "stop" else note[0] for note in take(notes, "take")] == ["run", "stop", "take", "take"]
        assert pool.run(min) == [0, 1]
        assert [note if note == "stop" else note[:2] for note in take(notes)] == [
            "stop", ("join", 2), ("set up", 2), ("run", 2)]


def test_those_that_did_not_join_are_ended(notes):
    with RankPool(2) as pool:
        notes.living.clear()
        take(notes)
        joined = pool._number + 1
        put = pool._control.set_word
        notes.fail = KeyboardInterrupt()
        clear = pool._control.clear_rank
        pool._control.clear_rank = lambda rank, birth: (clear(rank, birth), rank or put(0, ANSWERED, joined))
        with pytest.raises(KeyboardInterrupt):
            pool.run(min)
        assert take(notes)[-1] == ("end", [1]) and notes.living == {0}
        pool._control.clear_rank = clear
        assert pool.run(min) == [0, 1]
        assert [note[:2] for note in take(notes)] == [("start", 1), ("join", 3), ("set up", 3), ("run", 3)]


def test_memory_goes_only_when_a_run_in_another_thread_has_left(notes):
    pool = RankPool(2)
    held, release = threading.Event(), threading.Event()

    def run():
        with pool._lock:
            held.set()
            release.wait(20)
            assert pool._control.word(0, ANSWERED) == 0, "it looks once more"
            take(notes)

    def end_all(processes):
        release.set()  # the run sees its ranks die

    other = threading.Thread(target=run)
    other.start()
    held.wait(20)
    pool_module.end_all = end_all
    pool.close()
    assert [note[0] for note in take(notes)] == ["release", "release"] and not pool._lock.locked()
    other.join()


def test_a_pool_that_cannot_be_used_says_so_before_and_after_it_has_waited(notes):
    pool = RankPool(2)

    class Turn:
        def __enter__(self):
            pool.closed = True  # by another thread, while this one waits for its turn

        def __exit__(self, *exc):
            pass

    lock, pool._lock, number = pool._lock, Turn(), pool._number
    for _ in range(2):  # and the second time before it looks at what is to be sent
        with pytest.raises(RankError, match=r"this pool of 2 ranks is closed; make a new one: RankPool\(2\)"):
            pool.run(min, *[lock] * pool.closed)
    assert pool._number == number
    pool._lock = lock
    pool.closed, pool._owner = False, threading.get_ident()
    with pytest.raises(RankError, match="already in a run of the same pool"):
        pool.run(min)
    pool._owner, pool._pid = None, 5
    with pytest.raises(RankError, match="belongs to process 5, of which this process .* is a fork; make a RankPool"):
        pool.run(min)
    pool.close()
    assert not pool.closed, "a fork does not close what is its parent's"
    pool._pid = os.getpid()
    pool.close()
    assert not pool._lock.locked()
