"""A damaged recording has an answer, or one sentence why it has none."""

import importlib
import random
import shutil

import pytest
from helpers.checkpoints import make_checkpoint
from helpers.mutations import in_memory, on_disk
from helpers.third_party import HfLike, VllmLike
from helpers.third_party_runs import TEXTS, batch_calls, flat_calls, run

from tplab.align.check.folder import read_recorded
from tplab.checkpoint import open_checkpoint
from tplab.errors import TplabError

checking = importlib.import_module("tplab.align.check.check")
SEEDS = range(40)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    ckpt = open_checkpoint(make_checkpoint(folder / "m", "llama", heads=6, kv_heads=2, head_dim=8, hidden=36, layers=2,
                                           inter=48, vocab=67))
    run(folder / "hf", ckpt, HfLike, batch_calls(TEXTS, 1))
    run(folder / "vllm", ckpt, VllmLike, flat_calls(TEXTS, 1), parameters=True)
    return ckpt, [folder / "hf", folder / "vllm"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_recording_has_an_answer(runs, tmp_path, monkeypatch, seed):
    (ckpt, folders), draw = runs, random.Random(seed)
    folder = shutil.copytree(draw.choice(folders), tmp_path / "run")
    if draw.random() < 0.3:
        what = on_disk(folder, draw)
    else:
        what, recorded = in_memory(read_recorded(folder), draw)
        monkeypatch.setattr(checking, "read_recorded", lambda folder: recorded)
    try:
        report = checking.check(folder, ckpt)
        assert report.summary() and not report.failed, (what, report.failed)
    except TplabError as error:
        assert str(error), what
