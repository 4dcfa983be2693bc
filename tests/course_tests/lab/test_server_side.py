"""The server side of a notebook: who may talk to it, what listens, what lies in the temp folder, what is never read.

JupyterLab is started as ``launch`` starts it, a kernel in it, and two ranks in that kernel; then all of their sockets
and files are looked at, from outside.
"""

import ast
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
from helpers.launching import command_of_launch
from jupyter_client import BlockingKernelClient

ROOT = Path(__file__).resolve().parents[3]
LOOPBACK = ("127.0.0.1", "::1")
TWO_RANKS = """
import torch, torch.distributed as dist
from tplab.pool import RankPool
from tplab.ranks import all_reduce
pool = RankPool(2)
pool.run(lambda: (all_reduce(torch.ones(4)), dist.all_reduce(torch.ones(4))))
print("pids", *pool.pids)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A running JupyterLab with a kernel in which a pool of two ranks has just worked."""
    place = tmp_path_factory.mktemp("lab")
    # A short name: multiprocessing puts a socket into the temp folder, and the path of a socket may have 100
    # characters.
    temp = place / "t"
    temp.mkdir()
    environment = {**os.environ, "TMPDIR": str(temp), "JUPYTER_RUNTIME_DIR": str(place / "runtime"),
                   "OMP_NUM_THREADS": "1",
                   "JUPYTER_CONFIG_DIR": str(place / "config"), "IPYTHONDIR": str(place / "ipython")}
    words = open(place / "words", "w+")  # a file: a pipe would not be emptied while the tests run
    server = subprocess.Popen([sys.executable, *command_of_launch()], stdin=subprocess.DEVNULL, stdout=words,
                              stderr=words,
                              env=environment, cwd=place)
    try:
        address, token = wait_for(lambda: re.search(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)", told(words)),
                                  300).groups()
        wait_for(lambda: ask(address, "/api/status", token), 300)
        kernel = json.loads(ask(address, "/api/kernels", token, b"{}"))["id"]
        file = wait_for(lambda: next((place / "runtime").glob(f"kernel-{kernel}.json"), None), 300)
        client = BlockingKernelClient(connection_file=str(file))
        client.load_connection_file()
        client.hb_channel.time_to_dead = 300  # a kernel that gets no core for a second is not dead
        client.start_channels()
        wait_for(lambda: is_ready(client), 300)
        printed = []
        reply = client.execute_interactive(TWO_RANKS, timeout=300,
                                           output_hook=lambda said: printed.append(said["content"]))
        assert reply["content"]["status"] == "ok", printed
        pids = [int(word) for word in re.search(r"pids ([\d ]+)", json.dumps(printed)).group(1).split()]
        yield SimpleNamespace(address=address, token=token, temp=temp, runtime=place / "runtime", pids=pids,
                              pid=server.pid)
        client.stop_channels()
    finally:
        family = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        try:
            server.wait(timeout=300)
        finally:
            for process in family:  # a kernel that the server could not end
                if process.is_running():
                    process.kill()
            server.kill()
            words.close()


def told(words):
    words.flush()
    return Path(words.name).read_text()


def wait_for(look, seconds):
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := look():
                return found
        except urllib.error.URLError:
            pass
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)


def is_ready(client):
    """On a busy machine a kernel that starts can be taken for a dead one."""
    try:
        client.wait_for_ready(timeout=60)
        return True
    except RuntimeError:
        return False


def ask(address, path, token=None, data=None):
    headers = {"Authorization": f"token {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=300) as answer:
        return answer.read()


def family(lab):
    """The server, its kernel, what starts the ranks, and the ranks."""
    processes = [psutil.Process(lab.pid), *psutil.Process(lab.pid).children(recursive=True)]
    assert {*lab.pids} < {process.pid for process in processes}
    return processes


# ---- the doors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path, data", [("/api/contents", None), ("/api/kernels", None), ("/api/kernels", b"{}"),
                                        ("/api/terminals", b"{}"), ("/files/README.md", None)])
@pytest.mark.parametrize("token", [None, "0" * 48])
def test_nothing_is_answered_without_the_token(lab, path, data, token):
    try:
        answer = ask(lab.address, path, token, data)
    except urllib.error.HTTPError as refused:
        assert refused.code == 403
    else:
        assert b"tplab" not in answer and b'type="password"' in answer, "neither refused nor asked for the token"


def test_the_token_opens(lab):
    assert json.loads(ask(lab.address, "/api/kernels", lab.token))


def test_everything_listens_on_loopback_only(lab):
    listening = {}
    for process in family(lab):
        for connection in process.net_connections("inet"):
            assert connection.laddr.ip in LOOPBACK, f"{process.name()} {process.pid}: {connection}"
            assert not connection.raddr or connection.raddr.ip in LOOPBACK, connection
            if connection.status == psutil.CONN_LISTEN:
                listening.setdefault(process.pid, []).append(connection.laddr.port)
    assert lab.pid in listening, "the server itself must have been seen"
    assert len(listening) >= 2, "nor the kernel"


# ---- the temp folder -------------------------------------------------------------------------------------------------


def test_temp_folders_are_private(lab):
    made = [path for path in lab.temp.iterdir() if path.is_dir()]
    assert any(path.name.startswith("tplab-") for path in made)
    for path in made:
        # torch's own, made by its import: for compiled code, of which there is none
        if path.name.startswith("torchinductor_"):
            assert not list(path.iterdir())
            continue
        assert path.stat().st_mode & 0o777 == 0o700, path
        assert path.stat().st_uid == os.getuid()


def test_nothing_lies_beside_the_private_folders(lab):
    assert not [path for path in lab.temp.iterdir() if not path.is_dir()]


def test_keys_of_kernel_and_server_are_for_their_owner_only(lab):
    keys = [*lab.runtime.glob("kernel-*.json"), *lab.runtime.glob("jpserver-*.json")]
    assert len(keys) == 2
    assert [path for path in keys if path.stat().st_mode & 0o077] == []


# ---- what is read ----------------------------------------------------------------------------------------------------


def trees():
    """``(file, its tree)`` of all code that a learner runs."""
    files = [path for folder in ("tplab", "notebooks/course") for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in [*files, ROOT / "launch"]:
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for n, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code":
                code = "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))
                yield f"{path.name}, cell {n}", ast.parse(code)


def test_remote_code_is_never_trusted():
    """Neither as an argument nor as a key of arguments."""
    found = []
    for where, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                found.append(where)
            elif isinstance(node, ast.Constant) and node.value == "trust_remote_code":
                found.append(where)
    assert not found
