"""Steps by the clock, on ranks as threads; one more busy process, which ends whatever happens."""


import psutil
import pytest
import torch

from course.cost import steps
from course.cost.links import link_rows
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


def test_a_busy_process_works_and_ends():
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
