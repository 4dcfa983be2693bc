"""The fused copy of a checkpoint: the same model, in a folder that goes with its process."""

import torch
from helpers.checkpoints import make_checkpoint
from helpers.failing import own_files
from safetensors import safe_open

from course import lesson
from tplab.align import align, reassemble
from tplab.checkpoint import open_checkpoint
from tplab.checkpoint.headers import SINGLE
from tplab.faults import fault


def test_a_fused_copy_is_the_same_model_in_fewer_tensors():
    ckpt = open_checkpoint("fable")
    made = lesson.fused_copy(ckpt)
    assert str(made.folder) in own_files()
    assert (len(ckpt.tensors), len(made.tensors)) == (74, 44)
    assert made.tensors["model.layers.3.self_attn.qkv_proj.weight"].shape == (192, 128)
    assert reassemble(made, tensor_parallel_size=3, logical=True) == {}
    assert len(reassemble(made, logical=True, patches=[fault("fused_one_block")])) == 48
    apart, together = (align(one, [5, 6, 7], logical=True) for one in (ckpt, made))
    assert together.ok and torch.equal(apart.tp_logits, together.tp_logits)


def test_a_head_of_its_own_and_all_that_is_no_weight_go_along(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", shards=2))
    (tmp_path / "m/tokenizer.json.txt").write_text("words")
    (tmp_path / "m/folder").mkdir()
    (tmp_path / "m" / "SHA256SUMS").write_text("sums of other files")
    made = lesson.fused_copy(ckpt)
    assert made.tensors["lm_head.weight"].shape == (67, 32) and "model.norm.weight" in made.tensors
    assert made.tensors["model.layers.1.self_attn.qkv_proj.bias"].shape == (32 + 2 * 16,)
    assert reassemble(made, logical=True) == {}
    assert {file.name for file in made.folder.iterdir()} == {"config.json", SINGLE, "tokenizer.json.txt"}
    assert (made.folder / "tokenizer.json.txt").read_text() == "words"
    with safe_open(made.folder / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}, "as transformers wants it"
