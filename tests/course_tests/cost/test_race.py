"""The race beside peers: all contestants work in turns and write the same, the table says what it must, and all end."""

import os
import signal
import sys
from types import SimpleNamespace

import psutil
import pytest
from helpers.checkpoints import make_checkpoint

from course.__main__ import main
from course.cost import race as race_module
from course.cost import vllm_side
from course.cost.race import NEW_TOKENS, VLLM, Timing, _alone, race
from tplab.errors import TplabError

# In vLLM's place: ready after a line of noise, with a child of its own; then a line for a line.
PEER = """
import json, os, subprocess, sys
say = os.fdopen(int(sys.argv[1]), "w", buffering=1)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("INFO what libraries say", flush=True)
print(json.dumps({"ready": sys.argv[2:]}), file=say)
for line in sys.stdin:
    work = json.loads(line)
    if work["prompt"] == [0]:
        child.kill()
        sys.exit("out of luck")
    told = [os.environ["VLLM_CPU_OMP_THREADS_BIND"], child.pid] if work["prompt"] == [1] else work["prompt"]
    print(json.dumps({"first": 0.5, "total": 2.0, "tokens": told}), file=say)
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setattr(vllm_side, "__file__", str(tmp_path / "peer.py"))
    ckpt = SimpleNamespace(folder="folder", config=SimpleNamespace(max_position_embeddings=300))
    made = VLLM(ckpt, 2, "bfloat16", sys.executable)
    yield made
    if made.process.poll() is None:
        made.close()


def ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.pool
def test_tplab_and_hugging_face_write_the_same_and_the_table_names_both(tmp_path, monkeypatch):
    folder, lines = make_checkpoint(tmp_path / "m", "qwen2", layers=1, tie=True), []
    monkeypatch.setattr(race_module, "PAUSE", 0)
    ours, theirs = race(str(folder), 2, dtype="float64", show=lines.append)
    assert (ours["name"], theirs["name"]) == ("tplab, 2 ranks", "HF generate, 2 threads")
    assert ours["equal"] == theirs["equal"] == ours["ratio"] == 1, "in float64 both write the same"
    assert all(row["low"] <= row["median"] <= row["high"] and row["ready"] > 0 for row in (ours, theirs))
    assert "5 rounds" in lines[0] and [line.split(",")[0] for line in lines[2:]] == ["tplab", "HF generate"]


def test_the_first_token_belongs_to_the_prompt():
    assert Timing(first=2.0, total=10.0, tokens=[]).speed == (NEW_TOKENS - 1) / 8


def test_vllm_is_bound_to_all_cores(peer):
    assert peer.name == "vLLM, 2 threads" and peer.time([1]).tokens[0] == "0,1"
    assert peer.time([5, 6]) == Timing(0.5, 2.0, [5, 6])
    assert os.getsid(peer.pids[0]) == peer.pids[0], "Ctrl-C in this terminal is not for it"


def test_one_that_is_not_measured_stands_still_with_all_it_has_started_and_ends_stopped_or_not(peer):
    child = peer.time([1]).tokens[1]
    with pytest.raises(KeyboardInterrupt), _alone(None, [peer]):
        for pid in (*peer.pids, child):
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                os.sched_yield()
        raise KeyboardInterrupt
    assert peer.time([5]).tokens == [5], "it goes on where it stood"
    os.kill(child, signal.SIGSTOP)
    peer.close()
    while not (ended(peer.pids[0]) and ended(child)):
        os.sched_yield()


def test_a_peer_that_has_ended_says_its_last_words(peer):
    for _ in range(2):
        with pytest.raises(TplabError, match="vLLM, 2 threads has ended: out of luck"):
            peer.time([0])


@pytest.mark.parametrize("words, said", [
    ("--model fable --rounds 4", "at least 5 rounds, not 4"),
    ("--model smolm2", "did you mean 'smollm2'")])
def test_what_is_no_race_is_one_line(words, said, capsys):
    assert main(["bench", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_python_that_cannot_be_started_is_named():
    ckpt = SimpleNamespace(folder="folder", config=SimpleNamespace(max_position_embeddings=300))
    with pytest.raises(TplabError, match="nowhere/python cannot be started: No such file"):
        VLLM(ckpt, 1, "float32", "nowhere/python")
