"""Ranks in hostile places: no name, no IPv6, no shared memory. Real ones, in Linux namespaces."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers.failing import light_path

NAMESPACES = ["unshare", "--map-root-user", "--mount", "--uts", "--net"]
HELLO = """
import json, torch, torch.distributed as dist
from tplab.pool import RankPool
from tplab.ranks import RankError, all_reduce, rank
def fn():
    dist.all_reduce(t := torch.ones(2))
    return all_reduce(torch.ones(2)).tolist(), t.tolist(), rank()
"""


GOOD = [[[2.0, 2.0], [2.0, 2.0], 0], [[2.0, 2.0], [2.0, 2.0], 1]]


def inside(tmp_path, setup, code):
    """Run Python code in namespaces of its own after some shell commands; skipped where the system refuses them."""
    if sys.platform != "linux" or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs Linux with unshare and iproute2")
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("this system does not allow unprivileged namespaces")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": light_path(tmp_path), "CODE": HELLO + code}
    command = f'set -e\nip link set lo up\n{setup}\nexec "{sys.executable}" -c "$CODE"'
    done = subprocess.run(
        [*NAMESPACES, "sh", "-c", command], env=environment, capture_output=True, text=True, timeout=300
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
pool = RankPool(2)
print(json.dumps([pool.run(fn), pool.run(lambda t: t.sum().item(), torch.ones(5_000_000))]))
"""
    assert inside(tmp_path, setup, code) == [GOOD, [5e6, 5e6]]
