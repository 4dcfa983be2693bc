"""The same functions under torchrun: one command, real processes, gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tplab.ranks import RankError, join_torchrun


def torchrun(tmp_path, source, *options, size=2):
    file = tmp_path / "spmd.py"
    imports = "import os, signal, sys, torch\nfrom tplab.pool import RankPool\nfrom tplab.ranks import *\n"
    file.write_text(imports + source)
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-addr", "127.0.0.1",
         "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *options, str(file)],
        env={**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What rank 1 of two says in one run of several parts."""
    done = torchrun(
        tmp_path_factory.mktemp("torchrun"),
        """
import pathlib, time
from tplab.ranks.oplog import DTYPES

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines: print writes their ends apart here

assert under_torchrun()
me, size = join_torchrun()
import torch.distributed.nn.functional  # as transformers does
assert (me, size) == (rank(), world_size())
def say(*words):
    if me == 1: tell(*words)
total = all_reduce(torch.tensor([1.0, me]))
joined = all_gather(torch.full((2, me + 1), float(me)), sizes=[1, 2])
word = broadcast(torch.tensor([me + 5.0]), 1)
barrier()
say(total.tolist(), joined.tolist(), word.tolist(), len(op_log()))
try:
    RankPool(2)
except RankError as error:
    say(error)
barrier()
for i, meet in enumerate([barrier, lambda: all_reduce(torch.ones(0)), lambda: all_gather(torch.ones(2, 0))]):
    late = pathlib.Path(__file__).with_name(f"late {i}")
    if me == 1:
        time.sleep(0.3)
        late.touch()
    meet()
    assert late.exists(), i

for dtype in DTYPES[1:]:
    mine = torch.tensor([me, 1, 0]).to(dtype)
    joined = all_gather(mine)
    total = all_reduce(mine.clone())
    assert joined.dtype == total.dtype == dtype
    assert joined.tolist() == torch.tensor([0, 1, 0, 1, 1, 0]).to(dtype).tolist(), dtype
    assert total.tolist() == torch.tensor([1, 2, 0]).to(dtype).tolist(), dtype
    assert torch.equal(broadcast(mine, 1), torch.tensor([1, 1, 0]).to(dtype)), dtype
say("all dtypes")
""",
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


def test_collectives_give_what_a_pool_gives(lines):
    assert lines[0] == "[2.0, 1.0] [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]] [6.0] 4"
    assert "RankPool was called inside rank 1" in lines[1]


def test_a_collective_without_elements_waits_and_every_dtype_crosses(lines):
    """gloo itself does not wait where there is nothing to gather, and knows no int16, which it called a lost rank."""
    assert lines[2] == "all dtypes"


def test_a_lost_rank_is_named_with_the_line(tmp_path):
    # Rank 1 closes its connections and stays: if it ended, torchrun could end rank 0 before it has said a word.
    done = torchrun(tmp_path, """
join_torchrun()
barrier()
if rank() == 1:
    torch.distributed.destroy_process_group()
    signal.pause()
all_reduce(torch.ones(2))
""")
    assert done.returncode != 0
    assert "rank 0 waited in all_reduce [2] float32 at line 10 of spmd.py" in done.stderr


def test_without_torchrun_it_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RankError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start this with torchrun"):
        join_torchrun()
