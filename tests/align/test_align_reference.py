"""The reference side: Hugging Face's model of exactly the files that were opened, whatever was in the folder before."""

import gc
import json
import weakref

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.align import align, diagnose, hf_greedy
from tplab.align.reference import hf_model
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def new_weights(folder):
    make_checkpoint(folder, seed=7)


def new_theta(folder):
    edit(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 300.0})


@pytest.mark.parametrize("change", [new_weights, new_theta])
def test_a_folder_that_was_written_anew_is_read_anew(tmp_path, change):
    folder = make_checkpoint(tmp_path / "m", seed=1)
    before = align(folder, IDS, logical=True)
    change(folder)
    after = align(folder, IDS, logical=True)
    assert before.ok and after.ok, after.summary()
    assert (before.hf_logits - after.hf_logits).abs().max() > 0.01
    assert diagnose(after).ok


def test_generate_follows_the_folder_too(tmp_path):
    folder = make_checkpoint(tmp_path / "m", seed=1)
    plain = hf_greedy(open_checkpoint(folder), IDS, 12)
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 30.0}))
    assert hf_greedy(open_checkpoint(folder), IDS, 12) != plain


def test_files_that_nobody_touched_are_loaded_once(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    assert hf_model(open_checkpoint(folder), torch.float32) is hf_model(open_checkpoint(folder), torch.float32)
    assert [hf_model(open_checkpoint(folder), dtype).dtype for dtype in (torch.float64, torch.float32)] == [
        torch.float64, torch.float32], "each dtype is a model of its own"


def test_two_small_models_are_kept_and_no_large_one_beside_another(tmp_path, smollm2):
    a, b, c = (open_checkpoint(make_checkpoint(tmp_path / name, seed=seed)) for seed, name in enumerate("abc"))
    first, second = hf_model(a, torch.float32), hf_model(b, torch.float32)
    assert hf_model(a, torch.float32) is first and hf_model(b, torch.float32) is second
    assert hf_model(a, torch.float32) is first, "asked for again"
    hf_model(c, torch.float32)
    assert hf_model(a, torch.float32) is first and hf_model(b, torch.float32) is not second
    large = weakref.ref(hf_model(smollm2, torch.bfloat16))
    assert hf_model(smollm2, torch.bfloat16) is large()
    hf_model(a, torch.float32)
    gc.collect()
    assert large() is None


def test_a_report_is_diagnosed_from_any_working_folder(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    report = align("m", IDS, patches=[fault("no_mask")], logical=True)
    monkeypatch.chdir("/")
    assert diagnose(report).fault == "no_mask"


def test_a_longer_prompt_leaves_nothing_behind_in_a_dynamic_rope(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "llama", rope="dynamic", max_positions=20)
    ckpt = open_checkpoint(folder)
    object.__setattr__(ckpt.config, "max_position_embeddings", 80)
    ids = torch.randint(67, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    for length in (60, 30, 10, 45):
        assert align(ckpt, ids[:length], logical=True).ok, length
