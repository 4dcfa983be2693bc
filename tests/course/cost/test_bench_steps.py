"""Steps by the clock, on ranks as threads; one more busy process, which ends whatever happens."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch

from course.cost import steps
from course.cost.outlook import link_rows
from tplab import LLM


def test_each_kind_of_step_is_run_as_it_is_counted(monkeypatch):
    asked = []
    monkeypatch.setattr(steps, "TOKENS", 4)
    with LLM("fable", 2, logical=True, enable_prefix_caching=False) as llm:
        kinds, generate = steps.step_kinds(llm.checkpoint.config), llm.generate

        def noted(prompts, params, use_tqdm):
            asked.append((len(prompts), len(prompts[0]), params.max_tokens))
            return generate(prompts, params, use_tqdm=use_tqdm)

        llm.generate = noted
        found = steps.time_steps(llm, repeats=1)
    assert list(found) == list(kinds) == ["decode", "16 sequences", "prompt"] and min(found.values()) > 0
    assert asked == [(1, 62, 4), (16, 62, 4), (1, 256, 1)]
    assert list(kinds.values()) == [[(64, 1)], [(64, 1)] * 16, [(0, 256)]], "62 tokens, then the middle one of four"


def test_a_step_takes_what_lies_between_the_last_prompts_first_token_and_the_end(monkeypatch):
    clock, asked = iter([10.0, 30.0, 40.0, 42.5]), []
    monkeypatch.setattr(steps.time, "perf_counter", lambda: next(clock))

    def generate(prompts, params, use_tqdm):
        asked.append((prompts, params.max_tokens, params.temperature, params.ignore_eos))
        return [SimpleNamespace(metrics=SimpleNamespace(time_to_first_token=seconds)) for seconds in (1.0, 8.5)]

    llm = SimpleNamespace(generate=generate)
    assert steps.decode_seconds(llm, 2, 3) == (20 - 8.5) / 23 and steps.prompt_seconds(llm, 1, 4) == 2.5
    assert asked == [([[2] * 3, [3] * 3], 24, 0, True), ([[2] * 4], 1, 0, True)], "other prompts, so none is cached"


def test_the_least_of_the_runs_counts(monkeypatch):
    took = iter([99, 1, 5, 2, 98, 6, 4, 3])
    monkeypatch.setattr(steps, "decode_seconds", lambda llm, sequences, context: next(took))
    monkeypatch.setattr(steps, "prompt_seconds", lambda llm, prompts, length: prompts * length)
    config = SimpleNamespace(max_position_embeddings=100, ropes={None: {"rope_type": "default"}})
    found = steps.time_steps(SimpleNamespace(checkpoint=SimpleNamespace(config=config)), repeats=4)
    assert found == {"decode": 1, "16 sequences": 3, "prompt": 50}, "a prompt of half the model's length at most"


def test_a_busy_process_ends_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-S", "-c", "import subprocess, sys\n"
                               "child = subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]], stdout=-1)\n"
                               "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()", steps._SPIN],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    busy = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    try:
        until = time.monotonic() + 300
        while busy.is_running() and busy.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, "it spins for ever"
            os.sched_yield()
    finally:
        with suppress(psutil.NoSuchProcess):
            busy.kill()


def test_a_busy_process_is_at_work_before_anything_is_measured(monkeypatch, tmp_path):
    begun = f"open({str(tmp_path / 'begun')!r}, 'w')"
    monkeypatch.setattr(steps, "_SPIN", f"import time; time.sleep(0.05); {begun}; print(flush=True); time.sleep(60)")
    with steps.busy_process():
        assert (tmp_path / "begun").exists()


def test_a_busy_process_works_and_ends(monkeypatch):
    with steps.busy_process() as pid:
        process = psutil.Process(pid)
        assert process.is_running()
    assert not psutil.pid_exists(pid) or process.status() == psutil.STATUS_ZOMBIE
    with pytest.raises(KeyboardInterrupt), steps.busy_process() as pid:
        raise KeyboardInterrupt
    assert not psutil.pid_exists(pid)


def test_links_are_compared_on_every_number_of_ranks():
    rows = link_rows(["llama-3.1-70b", "mistral-7b"], (1, 8), torch.bfloat16)
    assert [(row["model"], row["link"]) for row in rows][:2] == [("llama-3.1-70b", "nvlink"), ("llama-3.1-70b", "pcie")]
    assert rows[0]["1 rank"] == "no room" and rows[3]["1 rank"].endswith("(0%)")
    assert rows[0]["8 ranks"] == "147 (24%)", "161 sums of 10 µs and 16 KB, and 17 GB over 3.35 TB/s"
    assert [row["8 ranks"].split()[1] for row in rows[1:3]] == ["(57%)", "(76%)"]
