"""Files that lie: each kind of damage is refused by name when the checkpoint is opened."""

import json
import shutil

import pytest
import torch
from helpers.checkpoints import make_checkpoint, save_tensors
from safetensors.torch import load_file, save_file

from tplab.checkpoint import CheckpointError, open_checkpoint

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def single(tmp_path):
    return make_checkpoint(tmp_path / "m")


@pytest.fixture
def sharded(tmp_path):
    return make_checkpoint(tmp_path / "m", shards=2)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


# --- the safetensors files themselves


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated(single, keep):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is damaged" in refusal(single)


def test_wrong_dtype(single):
    tensors = load_file(single / "model.safetensors")
    save_tensors(single, tensors | {GATE: tensors[GATE].to(torch.int16)})
    assert f"{GATE} in model.safetensors is stored as I16; what is read is F64, F32, F16, BF16," in refusal(single)


def test_two_half_precisions_in_one_checkpoint(tmp_path):
    folder = make_checkpoint(tmp_path / "m", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for named in GATE, min(tensors):  # the first of each in the order of the file
        save_tensors(folder, tensors := tensors | {named: tensors[named].half()})
        assert f"wrong dtype: {named} is float16 while" in refusal(folder)


@pytest.mark.parametrize("wrong", [(32, 43), (43, 32, 1)])
def test_wrong_shape(single, wrong):
    tensors = load_file(single / "model.safetensors")
    save_tensors(single, tensors | {GATE: torch.ones(wrong)})
    assert f"{GATE} in model.safetensors has shape {list(wrong)}, but config.json asks for [43, 32]" in refusal(single)


def test_missing_and_unexpected_tensors(single):
    tensors = load_file(single / "model.safetensors")
    extra = tensors | {"model.layers.0.mlp.extra.weight": torch.ones(2)}
    save_tensors(single, extra)
    assert "unexpected tensor model.layers.0.mlp.extra.weight" in refusal(single)
    del tensors[GATE]
    save_tensors(single, tensors)
    assert refusal(single).endswith(f"{GATE} missing")


# --- several files and their index


def test_tensors_are_found_in_the_files_whatever_the_index_says_of_each(sharded):
    """As in Hugging Face: the index says which files there are, and their headers what is in them."""
    other = {FIRST: SECOND, SECOND: FIRST}
    opened = open_checkpoint(sharded).tensors
    edit_index(sharded, lambda m: m.update({GATE: other[m[GATE]], "made.up": FIRST}))
    assert open_checkpoint(sharded).tensors == opened


def test_the_same_tensor_in_two_files(sharded):
    tensors = load_file(sharded / SECOND)
    save_file(tensors | load_file(sharded / FIRST), sharded / SECOND)
    assert f"is in two files, {FIRST} and {SECOND}" in refusal(sharded)


@pytest.mark.parametrize("file", ["../../x.safetensors", "/etc/passwd", "..", "", "a\\b.safetensors", None,
                                  "pytorch_model-00001-of-00002.bin", "model.safetensors.bin"])
def test_index_that_climbs_out_of_the_folder(sharded, file):
    edit_index(sharded, lambda m: m.update({GATE: file}))
    assert f"puts {GATE} into {file!r}; only .safetensors files of this folder are read" in refusal(sharded)


def test_a_single_file_is_taken_before_an_index(sharded):
    shutil.copy(sharded / FIRST, sharded / "model.safetensors")
    assert "missing" in refusal(sharded)


# --- paths


def test_a_file_that_is_a_folder(single):
    for file, words in {"model.safetensors": "is missing, or not an ordinary file", "config.json": "Is a dir"}.items():
        (single / file).unlink()
        (single / file).mkdir()
        assert words in refusal(single)
