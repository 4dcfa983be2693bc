"""Hundreds of random faults on one pool, one after the other: it works on, and nothing piles up.

The suite takes 24 faults; ``TPLAB_SOAK=300 pytest tests/pool/test_pool_soak.py`` the full number (about a minute on two
cores), any other number as well. ``TPLAB_SEED`` chooses another order.
"""

import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from helpers.failing import SOON, descriptors, own_files

from tplab.pool import RankPool
from tplab.ranks import RankError, all_gather, all_reduce, barrier, broadcast, rank

# As a notebook's functions travel: by value. Else every new rank would import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

COUNT = int(os.environ.get("TPLAB_SOAK", "24"))
SEED = int(os.environ.get("TPLAB_SEED", "2"))


def work(before=0):
    for i in range(before):
        all_reduce(torch.full((i % 7 + 1,), 1.0))


def raises(who, before):
    work(before)
    if rank() == who:
        raise ValueError("on purpose")
    work(3)


def killed(who, before, number):
    work(before)
    if rank() == who:
        os.kill(os.getpid(), number)
    work(3)


def exits(who, before):
    work(before)
    if rank() == who:
        os._exit(7)
    work(3)


def skips(who, before):
    work(before)
    if rank() != who:
        barrier()


def differs(who, before, kind):
    work(before)
    t = torch.ones(4, 2)
    if rank() != who:
        all_gather(t)
    elif kind == 0:
        all_reduce(t)
    elif kind == 1:
        all_gather(t[:3])
    elif kind == 2:
        all_gather(t.double())
    else:
        broadcast(t, 0)


def loops(who, before):
    work(before)
    while rank() == who:
        pass
    barrier()


def holds(who, before):
    work(before)
    if rank() == who:
        sum(itertools.repeat(1))
    barrier()


def gloo(who, before):
    work(before)
    (dist.barrier(async_op=True) if rank() == who else dist.all_reduce(torch.ones(3), async_op=True)).wait()


def unsendable(who, before):
    work(before)
    return threading.Lock() if rank() == who else None


def fine(who, before):
    work(before)
    return rank()


FAULTS = (raises, killed, exits, skips, differs, loops, holds, gloo, unsendable, fine, "from outside", "interrupt")
SHORT = {loops: 0.2, holds: 0.2, gloo: 0.2}


def counts(pool):
    """Of this process and its ranks: processes, descriptors, threads of a rank, files in the private folders."""
    ranks = [psutil.Process(pid) for pid in pool.pids]
    return {
        "processes": len(psutil.Process().children(recursive=True)),
        "descriptors": descriptors(),
        "descriptors of a rank": max(p.num_fds() for p in ranks),
        "threads of a rank": max(p.num_threads() for p in ranks),
        "files": sum(len(files) for folder in own_files() for _, _, files in os.walk(folder)),
        "folders": len(own_files()),
    }


def come_back_to(at_first, pool):
    """The counts when they are ``at_first`` again, or the last ones: a thread of a rank may still be ending."""
    end = time.monotonic() + SOON
    while (found := counts(pool)) != at_first and time.monotonic() < end:
        time.sleep(0.01)
    return found


def kill(pool, who, runs, after):
    """Once the next run has begun: before it, the pool would have a successor in place and the run would be a good one.
    """
    while pool.number_of_runs == runs:
        time.sleep(0.001)
    time.sleep(after)
    os.kill(pool.pids[who], signal.SIGKILL)


def settle(pool):
    gc.collect()  # the traceback of an exception keeps files open until then, this test's and earlier ones'
    for _ in range(2):
        assert pool.run(lambda: float(all_reduce(torch.ones(())))) == [float(pool.size)] * pool.size
        pool.run(lambda: dist.all_reduce(torch.ones(())))


def test_soak():
    choose = random.Random(SEED)
    seen, worst = Counter(), ("", 0.0)
    with RankPool(2, timeout=30) as pool:
        settle(pool)
        at_first = counts(pool)
        for _ in range(COUNT):
            fault, who, before = choose.choice(FAULTS), choose.randrange(2), choose.randrange(20)
            name = getattr(fault, "__name__", fault)
            seen[name] += 1
            begin = time.monotonic()
            if fault == "interrupt":
                with pytest.raises(KeyboardInterrupt):
                    threading.Timer(choose.uniform(0, 0.05), os.kill, (os.getpid(), signal.SIGINT)).start()
                    pool.run(loops, who, before)
            elif fault == "from outside":
                pool.run(rank)  # the one that died before this has a successor only now
                threading.Thread(target=kill, args=(pool, who, pool.number_of_runs, choose.uniform(0, 0.05))).start()
                with pytest.raises(RankError, match=rf"rank {who} died \(SIGKILL\)"):
                    pool.run(work, 1_000_000)
            elif fault is fine:
                assert pool.run(fine, who, before) == [0, 1]
            else:
                extra = {killed: [choose.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT))],
                         differs: [choose.randrange(4)]}
                with pytest.raises(RankError):
                    pool.run(fault, who, before, *extra.get(fault, []), timeout=SHORT.get(fault))
            worst = max(worst, (name, time.monotonic() - begin), key=lambda entry: entry[1])
            assert time.monotonic() - begin < SOON, f"{name} took {time.monotonic() - begin:.1f} s"
        settle(pool)
        at_last = come_back_to(at_first, pool)
    print(f"\n{COUNT} faults: {dict(seen)}; the longest {worst[0]}, {worst[1]:.2f} s; {at_first} → {at_last}")
    assert at_last == at_first
