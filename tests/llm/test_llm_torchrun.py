"""The same command on ranks that torchrun made: on one machine, and across two network namespaces."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers.checkpoints import make_checkpoint

PROMPT, TOKENS = "Once there was", 12
NAMES = (f"tplab-{os.getpid()}-a", f"tplab-{os.getpid()}-b")  # another run of the tests has its own
ADDRESSES = ("10.213.7.1", "10.213.7.2")


GENERATE = ["generate", "fable", "--prompt", PROMPT, "--max-tokens", str(TOKENS), "--json"]


def command(*torchrun, file):
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "tplab", *GENERATE, str(file)]


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def expected():
    from tplab.llm import LLM, SamplingParams

    with LLM("fable", 2, logical=True) as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS))[0]


SCRIPT = """
import json, os, sys
from tplab import cli, faults
from tplab.llm import SamplingParams, open_llm
folder, file, *command = sys.argv[1:]
assert not cli.main(command)
found = []
for names in [], ["shard_dim1"], ["rope_missing"], ["qkv_order"]:
    with open_llm(folder, 2, patches=faults.as_patches(names)) as llm:
        if llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            found.append(llm.generate([1, 2, 3], params)[0].outputs[0].token_ids)
if llm:
    open(file, "w").write(json.dumps(found))
sys.exit(cli.main([*command, "--max-tokens", "0"]))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One start of two ranks: ``generate``, an engine for each of some patches, ``generate`` with a bad request."""
    folder = tmp_path_factory.mktemp("torchrun")
    checkpoint = make_checkpoint(folder / "m")
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(folder / "script.py"), str(checkpoint), str(folder / "patched.json"), *GENERATE, str(folder / "out.json")],
        timeout=120, env=environment(), capture_output=True, text=True)
    done.folder, done.checkpoint = folder, checkpoint
    assert (folder / "out.json").exists(), done.stderr
    return done


def test_torchrun_on_one_machine(expected, done):
    assert json.loads((done.folder / "out.json").read_text())["token_ids"] == expected.outputs[0].token_ids
    assert done.stdout.count(expected.text.strip()) == 1, "only rank 0 may print"


def test_a_bad_request_under_torchrun_ends_all_ranks(done):
    assert done.returncode != 0 and "max_tokens must be" in done.stderr


def test_patches_are_applied_on_every_rank_while_loading_and_in_steps(done):
    """Rank 0 alone had them, and only in its steps: half of a fault is another fault."""
    from tplab import faults
    from tplab.llm import LLM, SamplingParams

    params, expected = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), []
    for names in [], ["shard_dim1"], ["rope_missing"], ["qkv_order"]:
        with LLM(done.checkpoint, 2, logical=True, patches=faults.as_patches(names)) as llm:
            expected.append(llm.generate([1, 2, 3], params)[0].outputs[0].token_ids)
    assert json.loads((done.folder / "patched.json").read_text()) == expected and len(set(map(str, expected))) == 4


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
            steps += [("-n", name, "addr", "add", f"{address}/24", "dev", "veth0"),
                      ("-n", name, "link", "set", "veth0", "up"),
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
    counters = subprocess.run(["ip", "-n", NAMES[0], "-s", "-j", "link", "show", "veth0"], capture_output=True,
                              text=True)
    (link,) = json.loads(counters.stdout)
    assert link["stats64"]["rx"]["bytes"] > 100_000
