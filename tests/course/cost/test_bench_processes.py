"""Contestants as processes: they stand still while another is measured, answer in lines, and end with all they started.

The peer is a small script; the states of processes are read from the system, and no test waits for a second to pass.
"""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from course.cost import peers, processes, vllm_side
from course.cost.peers import VLLM, Timing, Work
from course.cost.processes import Child, PeerError, alone, private_bytes, tree
from course.cost.run import equal_part

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
    assert os.getsid(child.pid) == child.pid, "Ctrl-C in this terminal is not for it"
    assert child.ask({"prompts": [[5]], "first": 1}, 60) == {"first": 0.5, "total": 2.0, "tokens": [[5]]}
    with pytest.raises(PeerError, match="which is no JSON"):
        child.ask({"prompts": [[1]]}, 60)
    with pytest.raises(PeerError, match="it has ended: out of luck"):
        child.ask({"prompts": [[0]]}, 60)
    with pytest.raises(PeerError, match="it has ended"):
        child.ask({"prompts": [[5]]}, 60)


def test_one_that_is_not_measured_stands_still_with_all_it_has_started(peer):
    child, hello = peer
    assert [process.pid for process in tree([child.pid])] == [child.pid, hello["child"]]
    with alone((), [child.pid]):
        assert stopped(child.pid) and stopped(hello["child"])
        with pytest.raises(PeerError, match="no answer in 0 seconds: INFO what libraries say"):
            child.ask({"prompts": [[5]]}, 0)
        with alone([child.pid], ()):
            assert child.hear(60)["tokens"] == [[5]], "it goes on where it stood"
    assert status(child.pid) != psutil.STATUS_STOPPED != status(hello["child"])


def test_a_tree_has_children_of_children():
    parent = subprocess.Popen(["sh", "-c", "sh -c 'sleep 600 & echo $!; wait'; :"], stdout=subprocess.PIPE)
    last = int(parent.stdout.readline())
    found = tree([parent.pid])
    assert (found[0].pid, found[-1].pid, len(found)) == (parent.pid, last, 3)
    for process in found:
        process.kill()
    assert not processes._has_ended(psutil.Process())
    parent.communicate()
    assert processes._has_ended(found[0])


def test_answers_come_in_pieces_and_all_of_them_within_one_time(monkeypatch):
    child, waits, clock = object.__new__(Child), [], iter([100.0, 100.0, 103.0])
    child.answers, write = os.pipe()
    child.rest = b'{"a": 1}\n{"b": 2}\n{"c'
    pieces = iter([b'": [3', b', 4]}\n{"d'])

    def select(read, *rest):
        waits.append(rest[-1])
        os.write(write, next(pieces))
        return read, [], []

    assert child.hear(1) == {"a": 1} and child.hear(1) == {"b": 2}
    monkeypatch.setattr(processes, "select", select)
    monkeypatch.setattr(processes, "monotonic", lambda: next(clock))
    assert child.hear(5) == {"c": [3, 4]} and waits == [5.0, 2.0] and child.rest == b'{"d'
    os.close(child.answers)
    os.close(write)


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
from course.cost.processes import Child, alone, signals_end_properly
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


def test_a_race_that_is_ended_ends_stopped_contestants(script):
    race = subprocess.Popen([sys.executable, "-c", RACE, script], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, race.stdout.readline().split()))
    race.send_signal(signal.SIGTERM)
    assert race.wait(60) == 128 + signal.SIGTERM and len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid) and status(pid) != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_either_signal_ends_once(number):
    was, cleaned = signal.signal(number, signal.SIG_DFL), []
    try:
        with pytest.raises(SystemExit) as ended, processes.signals_end_properly():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)  # a second signal does not interrupt the cleaning up
                cleaned.append(number)
        assert cleaned == [number] and ended.value.code == 128 + number and signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, was)


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
    uss = {pid: psutil.Process(pid).memory_full_info().uss for pid in (child.pid, hello["child"])}
    with alone((), [child.pid]):
        assert private_bytes([child.pid]) == pytest.approx(sum(uss.values()), rel=0.02) and min(uss.values()) > 0


def test_a_program_has_this_ones_environment_and_more(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_TOLD", "here")
    path = tmp_path / "told.py"
    path.write_text("import json, os, sys; e = os.environ; os.write(int(sys.argv[1]), json.dumps("
                    "[e['TPLAB_TOLD'], e['MORE']]).encode() + b'\\n')")
    child = Child(sys.executable, str(path), env={"MORE": "3"})
    assert child.hear(60) == ["here", "3"]
    child.close()


def test_a_program_that_is_none():
    with pytest.raises(PeerError, match="nowhere/python cannot be started: No such file"):
        Child("nowhere/python", "script")


def test_vllm_is_asked_for_the_first_token_where_one_prompt_stands_alone(script, monkeypatch):
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


@pytest.mark.parametrize("tp, threads, name, bind", [
    (1, 3, "vLLM, 1 rank of 3 threads", "0,1,2"), (3, 1, "vLLM, 3 ranks", "0|1|2"),
    (2, 2, "vLLM, 2 ranks of 2 threads", "0,1|2,3")])
def test_vllm_has_a_core_for_each_rank_or_thread(tp, threads, name, bind, monkeypatch):
    made = []
    monkeypatch.setattr(peers, "Child", lambda *given, env: made.append((given, env)) or SimpleNamespace(
        hear=lambda timeout: {"ready": "1"}))
    ckpt = SimpleNamespace(folder="folder", config=SimpleNamespace(max_position_embeddings=300))
    assert VLLM(ckpt, tp, "float32", python="python", threads=threads).name == name
    (((*_, folder, size, dtype, length, prefix), env),) = made
    assert (folder, size, dtype, length, prefix) == ("folder", str(tp), "float32", "300", "0")
    assert env == {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind, "PYTHONPATH": ""}


@pytest.mark.parametrize("prefix", ["0", "1"])
def test_vllms_side_answers_each_line_and_asks_for_the_first_token_alone_where_it_is_wanted(prefix, monkeypatch):
    read, write = os.pipe()
    asked, clock = [], iter([10.0, 11.5, 20.0, 24.0, 30.0, 37.0])

    class Engine:
        def __init__(self, folder, **options):
            asked.append((folder, options))

        def generate(self, prompts, params, use_tqdm):
            asked.append((prompts, params, use_tqdm))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(5,) * one["max_tokens"])]) for one in params]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, __version__="9.9", SamplingParams=dict))
    monkeypatch.setattr(vllm_side.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(sys, "stdin", [json.dumps({"prompts": [[1, 2]], "new_tokens": [3], "first": True}),
                                       json.dumps({"prompts": [[1], [2]], "new_tokens": [2, 1], "first": False})])
    vllm_side.main(str(write), "folder", "2", "bfloat16", "300", prefix)
    with open(read) as said:
        assert list(map(json.loads, said)) == [
            {"ready": "9.9"}, {"first": 1.5, "total": 4.0, "tokens": [[5] * 3]},
            {"first": 0.0, "total": 7.0, "tokens": [[5] * 2, [5]]}]
    assert asked[0] == ("folder", {
        "tensor_parallel_size": 2, "dtype": "bfloat16", "max_model_len": 300, "max_num_seqs": 64,
        "skip_tokenizer_init": True, "enable_prefix_caching": prefix == "1"})
    assert [([one["prompt_token_ids"] for one in prompts], [one.pop("max_tokens") for one in params], progress)
            for prompts, params, progress in asked[1:]] == [
        ([[1, 2]], [1], False), ([[1, 2]], [3], False), ([[1], [2]], [2, 1], False)]
    assert asked[1][1] == [{"temperature": 0, "ignore_eos": True, "detokenize": False}]


def test_a_prefix_is_new_in_every_round_and_shared_in_it():
    work = Work([[10, 11, 12], [10, 11, 99]], [4, 4])
    one, two = work.shifted(1, 100), work.shifted(89, 100)
    assert one.prompts == [[11, 12, 13], [11, 12, 10]] and two.prompts[0][0] == 99 and one.new_tokens == [4, 4]


def test_tokens_are_compared_place_by_place():
    assert equal_part([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == 0.75
    assert equal_part([[1, 2]], [[1]]) == 0.5, "what is missing is not the same"
    with pytest.raises(ValueError):
        equal_part([[1]], [[1], [2]])
