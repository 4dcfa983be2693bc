"""Kernels that are forked from a process with the imports: as good as others, and they leave nothing behind."""

import multiprocessing as mp
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")
# Two kernels at a time, each with ranks. One is ended in order, the other by its parent's death; nothing is left.
SCRIPT = """
import os, sys
from jupyter_client.manager import start_new_kernel
from course.lab.warm import use_warm_kernels

use_warm_kernels()
kernels = [start_new_kernel(kernel_name="python3", cwd=sys.argv[1], env=os.environ | {"OWN": str(number),
                            "OMP_NUM_THREADS": str(number)}) for number in (1, 2)]

def said(client, code):
    words = []
    client.execute_interactive(code, timeout=120, output_hook=lambda message: words.append(
        message["content"].get("text") or message["content"].get("evalue") or ""))
    return "".join(words).strip()

for _, client in kernels:
    print(said(client, "import os, sys; print('transformers.models.qwen2.modeling_qwen2' in sys.modules, "
                       "'tplab.model' in sys.modules, os.environ['OWN'], os.getcwd())"))
    print(said(client, "import multiprocessing as mp, torch; print(torch.get_num_threads(), mp.get_start_method(), "
                       "'mine' in globals()); mine = 1"))
    print(said(client, "from tplab import shared_pool; from tplab.ranks import rank; pool = shared_pool(2); "
                       "print(pool.run(lambda: (os.environ['OWN'], rank())))"))
    print(said(client, "pids = {os.getpid(), *pool.run(os.getpid), *pool.run(os.getppid)}; print(*pids)"))
sys.stdout.flush()
manager, client = kernels[0]
client.stop_channels()
manager.shutdown_kernel()
print("ended", flush=True)
sys.stdin.readline()
"""


def test_two_kernels_have_their_own_settings_and_ranks_and_leave_nothing(tmp_path):
    running = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    pids: list[list[int]] = []
    for number in "12":
        lines = [running.stdout.readline().strip() for _ in range(4)]
        assert lines[:3] == [f"True False {number} {tmp_path}", f"{number} {mp.get_all_start_methods()[0]} False",
                             f"[('{number}', 0), ('{number}', 1)]"]
        pids.append([*map(int, lines[3].split())])
    watched = [[os.pidfd_open(pid) for pid in each] for each in pids]
    for at, end in enumerate([lambda: running.stdout.readline(), running.kill]):
        end()
        for fd, pid in zip(watched[at], pids[at], strict=True):
            assert select.select([fd], [], [], 60)[0], f"{pid} of {pids} runs on"
    assert running.wait() == -signal.SIGKILL
    assert not [path for pid in sum(pids, []) for path in Path(tempfile.gettempdir()).glob(f"tplab-{pid}-*")]
