"""Nothing outlives the notebook: close, exit, SIGKILL of the parent or of its group, forks, kernels."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from helpers.failing import light_path, own_files

from tplab.pool import RankPool, shared_pool
from tplab.ranks import RankError, rank


def script(tmp_path, source, *before, **options):
    """Start `source` as a learner's script, its temporary files in `tmp_path`; the command line begins with `before`.
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(source))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": light_path(tmp_path), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*before, sys.executable, str(file)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, **options
    )  # fmt: skip


def family(pid):
    """The processes below `pid`: fork server, its ranks, Python's resource tracker."""
    return psutil.Process(pid).children(recursive=True)


def left_of(processes, seconds=300.0):
    """Those that still run after so many seconds, of which they need less than three on a quiet machine."""
    gone, alive = psutil.wait_procs(processes, timeout=seconds)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def remains(tmp_path):
    """The pools' private folders (multiprocessing's own one stays behind a process that was killed)."""
    return [path.name for path in tmp_path.iterdir() if path.name.startswith("tplab-")]


# A pool in each state a rank can be in when the parent's end comes: each on its own thread of one process.
BUSY = """
    import itertools, threading, time, torch
    import torch.distributed as dist
    from tplab.pool import RankPool
    from tplab.ranks import all_reduce, rank

    def idle(): return None
    def loop():
        while True: pass
    def collective():
        if rank() == 0: time.sleep(100)
        all_reduce(torch.ones(1))
    def gloo():
        dist.recv(torch.ones(1), 1 - rank())
    def holds_the_interpreter():
        sum(itertools.repeat(1))
    def stubborn():
        while True:
            try: time.sleep(100)
            except BaseException: pass

    pools = [(RankPool(2), fn) for fn in (idle, loop, collective, gloo, holds_the_interpreter, stubborn)]
    threads = [threading.Thread(target=pool.run, args=(fn,), daemon=True) for pool, fn in pools]
    for thread in threads: thread.start()
    time.sleep(0.5)
    print("ready")
"""


def test_sigkill_of_the_parent(tmp_path):
    process = script(tmp_path, BUSY + "    time.sleep(100)\n", start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    processes = family(process.pid)
    assert len(processes) == 14  # 12 ranks, the fork server, the resource tracker
    process.kill()
    process.wait()
    assert not left_of(processes)
    assert remains(tmp_path) == []


def test_exit_of_the_interpreter_with_ranks_in_every_state(tmp_path):
    process = script(tmp_path, BUSY)
    assert process.stdout.readline() == "ready\n"
    processes = family(process.pid)
    rest = process.communicate(timeout=300)[0]
    assert not left_of(processes)
    assert process.returncode == 0 and "Fatal" not in rest and remains(tmp_path) == [], rest


def test_a_script_without_a_guard_and_a_fork_of_it(tmp_path):
    """A bare script works, on as many threads as asked for; a fork of it cannot use its ranks."""
    process = script(
        tmp_path,
        """
        import os
        import torch
        from tplab.pool import RankPool
        from tplab.ranks import RankError, all_reduce, rank

        print("begin")   # would show three times if the ranks ran this script again
        pool = RankPool(2)
        def fn():
            return all_reduce(torch.ones(1)).item() + rank()
        print(pool.run(fn))
        child = os.fork()
        if child == 0:
            try:
                pool.run(fn)
            except RankError as error:
                print("a fork of" if "is a fork; use it there" in str(error) else error)
            pool.close()
            os._exit(0)
        print(os.waitpid(child, 0)[1], pool.run(fn))
        print("pids", *pool.pids)
        os.kill(os.getpid(), 9)
        """,
        start_new_session=True,
    )
    lines = [process.stdout.readline().strip() for _ in range(5)]
    assert lines[:4] == ["begin", "[2.0, 3.0]", "a fork of", "0 [2.0, 3.0]"], lines
    process.wait()
    ranks = [psutil.Process(int(pid)) for pid in lines[4].split()[1:] if psutil.pid_exists(int(pid))]
    assert not left_of(ranks)


def test_a_jupyter_kernel(tmp_path, monkeypatch):
    """A real kernel: cells, an error, an interrupt, and the hard stop."""
    from jupyter_client.manager import KernelManager

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", light_path(tmp_path))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(Path(__file__).resolve().parents[2]))
    try:
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=300)

        def cell(code, interrupt_after=None):
            said = []

            def hear(message):
                kind, content = message["header"]["msg_type"], message["content"]
                said.append(content.get("text") or "\n".join(content.get("traceback", [])) or "")
                if kind == "stream" and "running" in said[-1] and interrupt_after is not None:
                    time.sleep(interrupt_after)
                    manager.interrupt_kernel()

            reply = client.execute_interactive(code, output_hook=hear, timeout=300)["content"]
            return reply, "".join(said)

        start = (
            "import os, time, torch, psutil\nfrom tplab.pool import shared_pool; from tplab.ranks import all_reduce, "
            "rank\n"
            "pool = shared_pool(2)\ndef fn():\n    print('hello')\n    return all_reduce(torch.ones(1)).item()\n"
        )
        _, said = cell(start + "print(pool.run(fn))")
        assert said == "[rank 0] hello\n[rank 1] hello\n[2.0, 2.0]\n"
        # A kernel that shuts down sends SIGTERM to all children in its group, and waits until none is left.
        _, said = cell("print([' '.join(child.cmdline()) for child in psutil.Process().children(recursive=True) "
                       "if os.getpgid(child.pid) == os.getpgrp()])")
        assert said == "[]\n", "the resource tracker would ignore it"
        reply, said = cell("def bad():\n    return 1 // rank()\npool.run(bad)")
        assert reply["ename"] == "RankError" and "cell In[3], line 2, in bad\n    return 1 // rank()" in said
        assert "watch.py" not in said and "pool.py" not in said
        wait = "def stuck():\n    if rank() == 0: time.sleep(100)\n    all_reduce(torch.ones(1))\n" \
               "print('running', flush=True)\n"
        begin = time.monotonic()
        reply, said = cell(wait + "pool.run(stuck)", interrupt_after=0.3)
        assert reply["ename"] == "KeyboardInterrupt" and time.monotonic() - begin < 30
        assert said.endswith("KeyboardInterrupt: the ranks were stopped; the pool can be used") and ".py" not in said
        assert cell("print(pool.run(fn)[0])")[1].endswith("2.0\n")

        processes = family(manager.provisioner.process.pid)
        assert len(processes) == 4  # two ranks, the fork server, the resource tracker
        client.execute(wait + "pool.run(stuck)")
        time.sleep(0.3)
        manager.shutdown_kernel(now=True)  # which is also how nbval stops, and how a restart begins
        assert not left_of(processes)
        assert remains(tmp_path) == []
    finally:
        client.stop_channels()
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


# Within this process.


def test_close_ends_the_ranks_and_frees_everything():
    shared_pool(2)  # so that the fork server is there already
    before = set(own_files())
    pool = RankPool(3)
    processes = [psutil.Process(pid) for pid in pool.pids]
    (folder,) = set(own_files()) - before
    assert os.stat(folder).st_mode & 0o777 == 0o700
    pool.close()
    pool.close()
    assert not left_of(processes) and not set(own_files()) - before


def test_a_pool_that_is_let_go_ends_too():
    pool = RankPool(1)
    processes = [psutil.Process(pid) for pid in pool.pids]
    del pool
    assert not left_of(processes)


def test_use_after_close_is_refused():
    pool = RankPool(1)
    pool.close()
    with pytest.raises(RankError, match=r"this pool of 1 ranks is closed; make a new one: RankPool\(1\)"):
        pool.run(rank)


def test_shared_pool_is_one_and_is_made_again():
    pool = shared_pool(2)
    assert shared_pool(2) is pool
    pool.close()
    again = shared_pool(2)
    assert again is not pool and again.run(rank) == [0, 1]
