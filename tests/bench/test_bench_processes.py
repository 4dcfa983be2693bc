"""Contestants as processes: they stand still while another is measured, answer in lines, and end with all they started.

The peer is a small script; the states of processes are read from the system, and no test waits for a second to pass.
"""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tplab.bench import processes
from tplab.bench.peers import VLLM, Timing, Work
from tplab.bench.processes import Child, PeerError, alone, private_bytes, tree
from tplab.bench.run import equal_part

PEER = """
import json, os, subprocess, sys
say = os.fdopen(int(sys.argv[1]), "w", buffering=1)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print("INFO what libraries say", flush=True)
print(json.dumps({"ready": sys.argv[2:], "child": child.pid, "bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND")}),
      file=say)
for line in sys.stdin:
    work = json.loads(line)
    if work.get("prompts") == [[0]]:
        sys.exit("out of luck")
    if work.get("prompts") == [[1]]:
        os.write(say.fileno(), b"no json\\n")
        continue
    print(json.dumps({"first": 0.5 * work.get("first", 0), "total": 2.0, "tokens": work.get("prompts")}), file=say)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    return str(path)


@pytest.fixture
def peer(script):
    child = Child(sys.executable, script, "m", "2")
    yield child, child.hear(60)
    if child.process.poll() is None:
        child.close()


def status(pid):
    return psutil.Process(pid).status()


def stopped(pid):
    """The kernel stops a process that sleeps a moment after the signal: ask it, by waiting for the state to change."""
    process = psutil.Process(pid)
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        os.sched_yield()
    return process.status() == psutil.STATUS_STOPPED


def test_questions_and_answers_are_lines(peer):
    child, hello = peer
    assert hello["ready"] == ["m", "2"], "what it prints is not taken for an answer"
    assert child.ask({"prompts": [[5]], "first": 1}, 60) == {"first": 0.5, "total": 2.0, "tokens": [[5]]}
    with pytest.raises(PeerError, match="which is no JSON"):
        child.ask({"prompts": [[1]]}, 60)
    with pytest.raises(PeerError, match="it has ended: out of luck"):
        child.ask({"prompts": [[0]]}, 60)
    with pytest.raises(PeerError, match="it has ended"):
        child.ask({"prompts": [[5]]}, 60)


def test_who_is_not_measured_stands_still_with_all_it_has_started(peer):
    child, hello = peer
    assert [process.pid for process in tree([child.pid])] == [child.pid, hello["child"]]
    with alone((), [child.pid]):
        assert stopped(child.pid) and stopped(hello["child"])
        with pytest.raises(PeerError, match="no answer in 0 seconds: INFO what libraries say"):
            child.ask({"prompts": [[5]]}, 0)
        with alone([child.pid], ()):
            assert child.hear(60)["tokens"] == [[5]], "it goes on where it stood"
    assert status(child.pid) != psutil.STATUS_STOPPED != status(hello["child"])


def test_they_go_on_also_when_a_measurement_is_cut_short(peer):
    child, hello = peer
    with pytest.raises(KeyboardInterrupt), alone((), [child.pid]):
        assert stopped(hello["child"])
        raise KeyboardInterrupt
    assert status(hello["child"]) != psutil.STATUS_STOPPED


def test_the_end_takes_everything_with_it_stopped_or_not(peer):
    child, hello = peer
    processes.send([child.pid], signal.SIGSTOP)
    assert stopped(hello["child"])
    child.close()
    assert not psutil.pid_exists(child.pid)
    assert not psutil.pid_exists(hello["child"]) or status(hello["child"]) == psutil.STATUS_ZOMBIE
    assert tree([child.pid]) == [] and private_bytes([child.pid]) == 0


RACE = """
import signal, sys
from tplab.bench.processes import Child, alone, signals_end_properly
with signals_end_properly():
    child = Child(sys.executable, sys.argv[1])
    try:
        hello = child.hear(60)
        with alone((), [child.pid]):
            print(child.pid, hello["child"], flush=True)
            signal.pause()
    finally:
        child.close()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_race_that_is_ended_ends_who_stands_still(script, number):
    race = subprocess.Popen([sys.executable, "-c", RACE, script], stdout=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    pids = list(map(int, race.stdout.readline().split()))
    race.send_signal(number)
    assert race.wait(60) == 128 + number and len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid) and status(pid) != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("before, ends", [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_a_signal_that_is_ignored_as_under_nohup_stays_so(before, ends):
    was = signal.signal(signal.SIGHUP, before)
    try:
        with processes.signals_end_properly():
            assert (signal.getsignal(signal.SIGHUP) is not before) == ends
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, was)


def test_memory_is_that_of_the_whole_tree(peer):
    child, hello = peer
    assert private_bytes([child.pid]) > private_bytes([hello["child"]]) > 0


def test_a_program_that_is_none():
    with pytest.raises(PeerError, match="nowhere/python cannot be started: No such file"):
        Child("nowhere/python", "script")


def test_vllm_is_asked_for_the_first_token_where_one_prompt_stands_alone(script, monkeypatch):
    from types import SimpleNamespace

    from tplab.bench import vllm_side

    monkeypatch.setattr(vllm_side, "__file__", script)
    ckpt = SimpleNamespace(folder="folder", config=SimpleNamespace(max_position_embeddings=9000))
    peer = VLLM(ckpt, 1, "bfloat16", True, python=sys.executable, threads=2)
    try:
        assert peer.version == ["folder", "1", "bfloat16", "4096", "1"] and peer.name == "vLLM, 1 rank of 2 threads"
        assert peer.time(Work([[5, 6]], [3])) == Timing(0.5, 2.0, [[5, 6]])
        assert peer.time(Work([[5], [6]], [3, 3])) == Timing(0.0, 2.0, [[5], [6]])
        (pid,) = peer.pids
    finally:
        peer.close()
    assert not psutil.pid_exists(pid)


def test_a_prefix_is_new_in_every_round_and_shared_in_it():
    work = Work([[10, 11, 12], [10, 11, 99]], [4, 4])
    one, two = work.shifted(1, 100), work.shifted(89, 100)
    assert one.prompts == [[11, 12, 13], [11, 12, 10]] and two.prompts[0][0] == 99 and one.new_tokens == [4, 4]


def test_tokens_are_compared_place_by_place():
    assert equal_part([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == 0.75
    assert equal_part([[1, 2]], [[1]]) == 0.5, "what is missing is not the same"
    with pytest.raises(ValueError):
        equal_part([[1]], [[1], [2]])
