"""The same command on ranks that torchrun made: on one machine, and across two network namespaces."""

import json
import os
import shutil
import subprocess
import sys

import pytest

PROMPT, TOKENS = "Once there was", 12
NAMES = ("tplab-a", "tplab-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def command(*torchrun, file, extra=()):
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "tplab", "generate", "fable", "--prompt", PROMPT,
            "--max-tokens", str(TOKENS), "--json", str(file), *extra]


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def expected():
    from tplab.engine import LLM, SamplingParams

    with LLM("fable", 2, logical=True) as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS))[0]


def test_torchrun_on_one_machine(expected, tmp_path):
    done = subprocess.run(command("--standalone", "--nproc-per-node", "2", file=tmp_path / "out.json"), timeout=120,
                          env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["token_ids"] == expected.outputs[0].token_ids
    assert done.stdout.count(expected.text.strip()) == 1, "only rank 0 may print"


def test_a_bad_request_under_torchrun_ends_all_ranks(tmp_path):
    done = subprocess.run(command("--standalone", "--nproc-per-node", "2", file=tmp_path / "out.json",
                                  extra=("--max-tokens", "0")), timeout=120, env=environment(), capture_output=True, text=True)
    assert done.returncode != 0 and "max_tokens must be" in done.stderr


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a veth pair, as two machines are by a cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two network namespaces need root and iproute2 (the ip command); not tested here")

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    def remove():
        for name in NAMES:
            ip("netns", "del", name)

    remove()
    first = ip("netns", "add", NAMES[0])
    if first.returncode:
        pytest.skip(f"this machine gives no network namespaces: {first.stderr.strip()}; not tested here")
    try:
        steps = [("netns", "add", NAMES[1]),
                 ("-n", NAMES[0], "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", NAMES[1])]
        for name, address in zip(NAMES, ADDRESSES):
            steps += [("-n", name, "addr", "add", f"{address}/24", "dev", "veth0"), ("-n", name, "link", "set", "veth0", "up"),
                      ("-n", name, "link", "set", "lo", "up")]
        for step in steps:
            done = ip(*step)
            if done.returncode:
                pytest.skip(f"ip {' '.join(step)}: {done.stderr.strip()}; not tested here")
        yield
    finally:
        remove()


def test_two_network_namespaces(namespaces, expected, tmp_path):
    """Nothing but the veth pair joins the two: what arrives went over it."""
    running = []
    for node, name in enumerate(NAMES):
        torchrun = ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node), "--master-addr", ADDRESSES[0],
                    "--master-port", "29577")
        running.append(subprocess.Popen(
            ["ip", "netns", "exec", name, *command(*torchrun, file=tmp_path / f"out{node}.json")],
            env=environment(GLOO_SOCKET_IFNAME="veth0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        results = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], results
    assert json.loads((tmp_path / "out0.json").read_text())["token_ids"] == expected.outputs[0].token_ids
    assert expected.text.strip() in results[0][0] and not (tmp_path / "out1.json").exists()
    counters = subprocess.run(["ip", "-n", NAMES[0], "-s", "-j", "link", "show", "veth0"], capture_output=True, text=True)
    (link,) = json.loads(counters.stdout)
    assert link["stats64"]["rx"]["bytes"] > 100_000
