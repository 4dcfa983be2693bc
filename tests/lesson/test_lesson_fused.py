"""The fused copy of a checkpoint: the same model, and gone afterwards."""

import subprocess
import sys
from pathlib import Path

import torch

from tplab import lesson
from tplab.align import align, reassemble
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault


def test_a_fused_copy_is_the_same_model_in_fewer_tensors():
    ckpt = open_checkpoint("fable")
    fused = lesson.fused_copy(ckpt)
    assert (len(ckpt.tensors), len(fused.tensors)) == (74, 44)
    assert fused.tensors["model.layers.3.self_attn.qkv_proj.weight"].shape == (192, 128)
    assert reassemble(fused, tensor_parallel_size=3, logical=True) == {}
    assert len(reassemble(fused, logical=True, patches=[fault("fused_one_block")])) == 48
    apart, together = (align(one, [5, 6, 7], logical=True) for one in (ckpt, fused))
    assert together.ok and torch.equal(apart.tp_logits, together.tp_logits)


def test_it_goes_away_with_its_process():
    code = "from tplab import lesson, open_checkpoint; print(lesson.fused_copy(open_checkpoint('fable')).folder)"
    folder = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert folder and not Path(folder).exists()
