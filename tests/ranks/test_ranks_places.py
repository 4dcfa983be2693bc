"""Ranks in hostile places: no name, no IPv6, no shared memory, no temporary folder. Real ones, in Linux namespaces."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from helpers.failing import light_path

from tplab.pool import RankPool
from tplab.ranks import RankError

NAMESPACES = ["unshare", "--map-root-user", "--mount", "--uts", "--net"]
HELLO = """
import json, torch, torch.distributed as dist
from tplab.pool import RankPool
from tplab.ranks import RankError, all_reduce, rank
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
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": light_path(tmp_path), "CODE": HELLO + code}
    command = f'set -e\nip link set lo up\n{setup}\nexec "{sys.executable}" -c "$CODE"'
    done = subprocess.run(
        [*NAMESPACES, "sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_full_and_read_only_temporary_folders(tmp_path):
    setup = """
        mkdir -p "$TMPDIR/full" "$TMPDIR/readonly"
        mount -t tmpfs -o size=8k tmpfs "$TMPDIR/full"
        dd if=/dev/zero of="$TMPDIR/full/x" bs=1k count=8 status=none || true
        mount -t tmpfs -o ro tmpfs "$TMPDIR/readonly"
        mkdir "$TMPDIR/later" "$TMPDIR/small"
        mount -t tmpfs tmpfs "$TMPDIR/later"
        mount -t tmpfs -o size=256k tmpfs "$TMPDIR/small"
    """
    code = """
import os, subprocess, tempfile
def attempt(fn):
    try:
        fn()
    except RankError as error:
        told.append(str(error))
told = []
for name in ("full", "readonly", "missing"):
    tempfile.tempdir = os.path.join(os.environ["TMPDIR"], name)
    attempt(lambda: RankPool(2))
tempfile.tempdir = os.path.join(os.environ["TMPDIR"], "later")
pool = RankPool(2)
subprocess.run(["mount", "-o", "remount,ro", tempfile.tempdir], check=True)
attempt(lambda: pool.run(lambda: 1 / 0))
attempt(lambda: pool.run(fn))
pool.close()
# A system that has no memory files: the shared memory itself lies there.
del os.memfd_create
tempfile.tempdir = os.path.join(os.environ["TMPDIR"], "small")
attempt(lambda: RankPool(2))
print(json.dumps(told))
"""
    full, read_only, missing, failed, later, small = inside(tmp_path, setup, code)
    assert "No space left on device" in full and "Set TMPDIR" in full and "/full/tplab-" in full
    assert "Read-only file system" in read_only and "readonly" in read_only
    assert "No such file or directory" in missing and "/missing/tplab-" in missing and "Set TMPDIR" in missing
    assert failed.startswith("rank") and "ZeroDivisionError" in failed
    assert "Read-only file system" in later and "/later/tplab-" in later and "Set TMPDIR" in later
    assert "No space left on device" in small and "/small/tplab-" in small and "Set TMPDIR" in small


def test_no_temporary_folder_at_all(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(RankError, match=r"No usable temporary directory found in \['/proc/nowhere'\]. Set TMPDIR"):
        RankPool(2)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """One start in a place with everything wrong at once: what two ranks did there."""
    setup = """
        hostname no-such-host.invalid
        echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || ip -6 addr del ::1/128 dev lo
        mount -t tmpfs -o size=16k tmpfs /dev/shm
        dd if=/dev/zero of=/dev/shm/full bs=1k count=16 status=none || true
        mkdir "$TMPDIR/small"
        mount -t tmpfs -o size=256k tmpfs "$TMPDIR/small"
        export TMPDIR="$TMPDIR/small"
    """
    code = """
import os, socket, subprocess, time
told = {}
try:
    socket.getaddrinfo(socket.gethostname(), None); told["named"] = True
except OSError:
    told["named"] = False
told["six"] = os.path.exists("/proc/net/if_inet6") and bool(open("/proc/net/if_inet6").read())
told["room"] = os.statvfs("/dev/shm").f_bavail
pool = RankPool(2)
told["first"] = pool.run(fn)
subprocess.run("dd if=/dev/zero of=$TMPDIR/fill bs=1k count=400 2>/dev/null", shell=True)
told["large"] = pool.run(lambda t: t.sum().item(), torch.ones(5_000_000))
os.kill(pool.pids[0], 9); time.sleep(0.2)
begin = time.monotonic()
try:
    told["without room"] = pool.run(fn)
except RankError as error:
    told["without room"] = str(error)
told["took"] = time.monotonic() - begin
os.unlink(os.environ["TMPDIR"] + "/fill")
told["again"] = pool.run(fn)
print(json.dumps(told))
"""
    return inside(tmp_path_factory.mktemp("hostile"), setup, code)


GOOD = [[[2.0, 2.0], [2.0, 2.0], 0], [[2.0, 2.0], [2.0, 2.0], 1]]


def test_no_host_name_no_ipv6_and_a_full_dev_shm(hostile):
    assert (hostile["named"], hostile["six"], hostile["room"]) == (False, False, 0)
    assert hostile["first"] == GOOD and hostile["large"] == [5e6, 5e6]


def test_a_temporary_folder_that_fills_up_while_the_pool_runs(hostile):
    """Runs and large values need no room there; and ranks that have to start again say what is missing."""
    assert hostile["large"] == [5e6, 5e6]
    assert hostile["took"] < 20
    assert hostile["without room"] == GOOD or "No space left on device" in hostile["without room"]
    assert hostile["again"] == GOOD


def test_no_loopback(tmp_path):
    code = """
try:
    RankPool(2)
except RankError as error:
    print(json.dumps(str(error)))
"""
    assert inside(tmp_path, "ip link set lo down", code) == (
        "the ranks meet over the loopback interface, and it is down; bring it up: ip link set lo up")


def test_a_temporary_folder_whose_name_is_too_long_for_a_socket(tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    code = HELLO + """
from multiprocessing import util
with RankPool(2) as pool:
    print(json.dumps([pool.run(fn), pool._folder, util.get_temp_dir()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True,
                          env={**os.environ, "TMPDIR": str(long), "PYTHONPATH": light_path(tmp_path)})
    results, own, sockets = json.loads(done.stdout)
    assert results == GOOD and own.startswith(f"{long}/tplab-") and len(sockets) < len(str(long))
    assert not os.path.exists(sockets) and not os.path.exists(own)
