"""What only a certain moment or size shows of the groups: a rank that fails late, pieces, dimensions."""

import subprocess
import sys

import torch

from tplab.ranks import all_gather, all_reduce, broadcast, logical_ranks, rank
from tplab.ranks.group import Group


def test_pieces_longer_than_one_swap_takes(monkeypatch):
    """Of equal and of uneven lengths, the own one the shortest or the longest."""
    monkeypatch.setattr(Group, "chunk", lambda self, dtype: 3)

    def fn():
        own = torch.arange(7.0) + 10 * rank()
        return (all_reduce(own.clone()), broadcast(own.clone(), 1),
                *(all_gather(own[:n[rank()]], 0, n) for n in ([7, 1, 0], [0, 3, 7], [2, 6, 4])))

    rows = [torch.arange(7.0) + 10 * r for r in range(3)]
    for total, word, *joined in logical_ranks(3, fn):
        assert torch.equal(total, sum(rows)) and torch.equal(word, rows[1])
        for found, n in zip(joined, ([7, 1, 0], [0, 3, 7], [2, 6, 4]), strict=True):
            assert torch.equal(found, torch.cat([row[:k] for row, k in zip(rows, n)]))


TRACED_BESIDE_A_SLEEPER = """
import sys, time
from tplab.ranks import RankError, logical_ranks

try:
    logical_ranks(2, time.sleep, 1e6, timeout=0.2)
except RankError as error:
    print(str(error).splitlines()[0])

def trace(frame, event, _):
    frame.f_trace_opcodes = True
    return trace

def steps():
    return sum(range(5))

for _ in range(1000):
    sys.settrace(trace)
    found = steps()
    sys.settrace(None)
print(found)
"""


def test_a_thread_that_sleeps_on_does_not_stop_others_that_are_traced():
    ran = subprocess.run([sys.executable, "-c", TRACED_BESIDE_A_SLEEPER], capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines()[-1] == "10" and "rank" in ran.stdout, ran.stdout + ran.stderr
