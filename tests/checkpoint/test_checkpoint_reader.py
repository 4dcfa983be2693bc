"""Slices: the right numbers, only those numbers, and their count."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from safetensors.torch import load_file

from tplab.checkpoint import CheckpointError, open_checkpoint

UP = "model.layers.0.mlp.up_proj.weight"  # [43, 32]


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "m", "qwen2", shards=3)


@pytest.fixture
def truth(folder):
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_slices_are_the_tensors_numbers(folder, truth):
    ckpt = open_checkpoint(folder)
    assert ckpt.tensors.keys() == truth.keys()
    with ckpt.reader() as r:
        for name, tensor in truth.items():
            assert r[name].shape == tuple(tensor.shape) and r[name].dtype == tensor.dtype
            assert torch.equal(r[name][:], tensor)
        assert torch.equal(r[UP][7:20], truth[UP][7:20]) and torch.equal(r[UP][7:20:1, ::1], truth[UP][7:20])
        assert torch.equal(r[UP][:, 5:6], truth[UP][:, 5:6])
        assert torch.equal(r[UP][3:9, 30:], truth[UP][3:9, 30:])
        assert r[UP][43:].shape == (0, 32) and r[UP][:, 4:4].shape == (43, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_come_as_they_are_stored(tmp_path, dtype):
    folder = make_checkpoint(tmp_path / "d", dtype=dtype)
    truth = load_file(folder / "model.safetensors")
    with open_checkpoint(folder).reader() as r:
        assert r[UP].dtype == dtype
        assert torch.equal(r[UP][:, 3:20], truth[UP][:, 3:20])
        assert r.bytes_read == 43 * 17 * dtype.itemsize


def test_bytes_are_those_of_the_slices(folder):
    """Red when a whole tensor is read to hand out a part of it and counted honestly, or a part is not counted."""
    with open_checkpoint(folder).reader() as r:
        r[UP]
        assert r.bytes_read == 0
        r[UP][10:12]
        assert r.bytes_read == 2 * 32 * 4
        r[UP][:, :3]
        assert r.bytes_read == (2 * 32 + 43 * 3) * 4


@pytest.mark.parametrize(
    "index",
    [
        slice(40, 44),  # Python and safetensors would both clamp this to three rows
        slice(-3, None),
        slice(9, 4),
        slice(0, 8, 2),
        5,
        [0, 1],
        ...,
        (slice(None), slice(0, 33)),
        (slice(None), slice(None), slice(None)),
    ],
)
def test_bounds_are_exact(folder, index):
    with open_checkpoint(folder).reader() as r:
        with pytest.raises(IndexError, match="up_proj"):
            r[UP][index]
        with pytest.raises(IndexError, match="norm.weight has 1 dimension, 2 slices were asked for"):
            r["model.norm.weight"][:4, :2]
        assert r[UP][0:0].shape == (0, 32)


def test_unknown_names_are_refused_and_what_was_read_stays(folder):
    with open_checkpoint(folder).reader() as r:
        with pytest.raises(CheckpointError, match="no tensor model.layers.9"):
            r["model.layers.9.mlp.up_proj.weight"]
        kept = r[UP][:2]
    assert kept.isfinite().all()
