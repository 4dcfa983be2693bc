"""Ranks in hostile places: no name, no IPv6, no shared memory, no temporary folder. Real ones, in Linux namespaces."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACES = ["unshare", "--map-root-user", "--mount", "--uts", "--net"]
HELLO = """
import json, torch, torch.distributed as dist
from tplab.ranks import RankPool, RankError, all_reduce, rank
def fn():
    dist.all_reduce(t := torch.ones(2))
    return all_reduce(torch.ones(2)).tolist(), t.tolist(), rank()
"""


def inside(tmp_path, setup, code):
    """Run Python code in namespaces of its own after some shell commands; skipped where the system refuses them."""
    if sys.platform != "linux" or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs Linux with unshare and iproute2")
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("this system does not allow unprivileged namespaces")
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": root, "CODE": HELLO + code}
    command = f'set -e\nip link set lo up\n{setup}\nexec "{sys.executable}" -c "$CODE"'
    done = subprocess.run(
        [*NAMESPACES, "sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_host_name_no_ipv6_and_a_full_dev_shm(tmp_path):
    setup = """
        hostname no-such-host.invalid
        echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || ip -6 addr del ::1/128 dev lo
        mount -t tmpfs -o size=16k tmpfs /dev/shm
        dd if=/dev/zero of=/dev/shm/full bs=1k count=16 status=none || true
    """
    code = """
import socket, os
try:
    socket.getaddrinfo(socket.gethostname(), None); named = True
except OSError:
    named = False
six = os.path.exists("/proc/net/if_inet6") and bool(open("/proc/net/if_inet6").read())
room = os.statvfs("/dev/shm").f_bavail
with RankPool(2) as pool:
    print(json.dumps([named, six, room, pool.run(fn), pool.run(lambda t: t.sum().item(), torch.ones(5_000_000))]))
"""
    named, six, room, results, sums = inside(tmp_path, setup, code)
    assert (named, six, room) == (False, False, 0)
    assert results == [[[2.0, 2.0], [2.0, 2.0], 0], [[2.0, 2.0], [2.0, 2.0], 1]]
    assert sums == [5e6, 5e6]


def test_full_and_read_only_temporary_folders(tmp_path):
    setup = """
        mkdir -p "$TMPDIR/full" "$TMPDIR/readonly"
        mount -t tmpfs -o size=8k tmpfs "$TMPDIR/full"
        dd if=/dev/zero of="$TMPDIR/full/x" bs=1k count=8 status=none || true
        mount -t tmpfs -o ro tmpfs "$TMPDIR/readonly"
    """
    code = """
import os, tempfile
told = []
for name in ("full", "readonly"):
    tempfile.tempdir = os.path.join(os.environ["TMPDIR"], name)
    try:
        RankPool(2)
    except RankError as error:
        told.append(str(error))
print(json.dumps(told))
"""
    full, read_only = inside(tmp_path, setup, code)
    assert "No space left on device" in full and "Set TMPDIR" in full and "/full/tplab-" in full
    assert "Read-only file system" in read_only and "readonly" in read_only


def test_a_temporary_folder_that_fills_up_while_the_pool_runs(tmp_path):
    """Runs, prints and large values need no room there; and a rank that has to be replaced says what is missing."""
    setup = """
        mkdir "$TMPDIR/small"
        mount -t tmpfs -o size=256k tmpfs "$TMPDIR/small"
        export TMPDIR="$TMPDIR/small"
    """
    code = """
import os, subprocess, time
pool = RankPool(2)
subprocess.run("dd if=/dev/zero of=$TMPDIR/fill bs=1k count=400 2>/dev/null", shell=True)
first = pool.run(lambda t: t.sum().item(), torch.ones(5_000_000))
os.kill(pool.pids[0], 9); time.sleep(0.2)
begin = time.monotonic()
try:
    told = pool.run(fn)
except RankError as error:
    told = str(error)
took = time.monotonic() - begin
os.unlink(os.environ["TMPDIR"] + "/fill")
print(json.dumps([first, told, took, pool.run(fn)]))
"""
    first, told, took, results = inside(tmp_path, setup, code)
    assert first == [5e6, 5e6]
    assert took < 2 and ("No space left on device" in told or told == results), told
    assert [result[2] for result in results] == [0, 1]
