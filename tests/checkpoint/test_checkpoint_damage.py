"""Files that lie: each kind of damage is refused by name when the checkpoint is opened."""

import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import make_checkpoint, save_tensors
from safetensors.torch import load_file, save_file

from tplab.checkpoint import CheckpointError, open_checkpoint, verify, write_sums

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path / "cache"))


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


def flip(path, position, bit=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)


def age(folder, seconds=10):
    """Make all files look as if written ``seconds`` ago: young files are never noted as verified."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


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


@pytest.mark.parametrize("position", [0, 6, 8, 9, 40, 200])
def test_flipped_byte_in_the_header(single, position):
    flip(single / "model.safetensors", position, 0x10)
    refusal(single)


def test_header_length_beyond_the_file(single):
    path = single / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])
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


def test_float32_norms_in_a_bfloat16_checkpoint_are_ordinary(tmp_path):
    folder = make_checkpoint(tmp_path / "m", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    save_tensors(folder, tensors | {"model.norm.weight": tensors["model.norm.weight"].float()})
    assert open_checkpoint(folder).tensors["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("wrong", [(32, 43), (43, 31), (1376,), (43, 32, 1)])
def test_wrong_shape(single, wrong):
    tensors = load_file(single / "model.safetensors")
    save_tensors(single, tensors | {GATE: torch.ones(wrong)})
    assert f"{GATE} in model.safetensors has shape {list(wrong)}, but config.json asks for [43, 32]" in refusal(single)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_or_inf_weights(tmp_path, bad, dtype):
    folder = make_checkpoint(tmp_path / "m", dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    tensors[GATE][42, 31] = bad
    save_tensors(folder, tensors)
    assert f"{GATE} contains {'NaN' if bad != bad else 'inf'}" in refusal(folder)


@pytest.mark.parametrize("chunk", [100, 10])
def test_large_tensors_are_searched_to_the_last_row(tmp_path, monkeypatch, chunk):
    """Three rows at a time: many chunks, the last one short; or one row, which is more than a chunk."""
    monkeypatch.setattr(verify, "_CHUNK_ELEMENTS", chunk)
    folder = make_checkpoint(tmp_path / "m")
    open_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[GATE][42, 0] = float("inf")
    save_tensors(folder, tensors)
    assert f"{GATE} contains inf, first seen in rows 42 to 42" in refusal(folder)


def test_missing_and_unexpected_tensors(single):
    tensors = load_file(single / "model.safetensors")
    extra = tensors | {"model.layers.0.mlp.extra.weight": torch.ones(2)}
    save_tensors(single, extra)
    assert "unexpected tensor model.layers.0.mlp.extra.weight" in refusal(single)
    del tensors[GATE]
    save_tensors(single, tensors)
    assert refusal(single).endswith(f"{GATE} missing")


def test_a_copy_of_a_tied_head_of_another_shape(tmp_path):
    folder = make_checkpoint(tmp_path / "m", tie=True)
    tensors = load_file(folder / "model.safetensors")
    save_tensors(folder, tensors | {"lm_head.weight": torch.ones(66, 32)})
    assert "lm_head.weight in model.safetensors has shape [66, 32], but config.json asks for [67" in refusal(folder)


def test_a_copy_of_a_tied_head_of_another_dtype(tmp_path):
    folder = make_checkpoint(tmp_path / "m", tie=True)
    tensors = load_file(folder / "model.safetensors")
    save_tensors(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].double()})
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(folder)


# --- several files and their index


def test_missing_shard(sharded):
    (sharded / SECOND).unlink()
    assert f"weight file {SECOND} is missing" in refusal(sharded)


def test_index_naming_a_file_that_is_not_there(sharded):
    edit_index(sharded, lambda m: m.update({GATE: "model-00003-of-00002.safetensors"}))
    assert "weight file model-00003-of-00002.safetensors is missing" in refusal(sharded)


def test_index_naming_the_wrong_file(sharded):
    other = {FIRST: SECOND, SECOND: FIRST}
    edit_index(sharded, lambda m: m.update({GATE: other[m[GATE]]}))
    assert f"puts {GATE} into" in refusal(sharded)


def test_index_that_forgets_or_invents_a_tensor(sharded):
    edit_index(sharded, lambda m: m.update({"made.up": FIRST}))
    assert f"puts made.up into {FIRST}, but it is not there" in refusal(sharded)
    edit_index(sharded, lambda m: [m.pop("made.up"), m.pop(GATE)])
    assert f"unexpected tensor {GATE}" in refusal(sharded)


def test_the_same_tensor_in_two_files(sharded):
    tensors = load_file(sharded / SECOND)
    save_file(tensors | load_file(sharded / FIRST), sharded / SECOND)
    assert f"is in two files, {FIRST} and {SECOND}" in refusal(sharded)


CLIMBERS = ["../../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors", "a:b.safetensors",
            None, 7]


@pytest.mark.parametrize("file", CLIMBERS)
def test_index_that_climbs_out_of_the_folder(sharded, file):
    edit_index(sharded, lambda m: m.update({GATE: file}))
    assert f"puts {GATE} into" in (message := refusal(sharded)) and "not a plain file name" in message


def test_index_of_pickled_files(sharded):
    for file in "pytorch_model-00001-of-00002.bin", "model.safetensors.bin":
        edit_index(sharded, lambda m, file=file: m.update({GATE: file}))
        assert "only .safetensors files are read" in refusal(sharded)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_index_that_is_none(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


def test_single_file_and_index_at_once(sharded):
    shutil.copy(sharded / FIRST, sharded / "model.safetensors")
    assert "both model.safetensors and model.safetensors.index.json" in refusal(sharded)


def test_an_index_over_one_file_of_the_usual_name(tmp_path):
    folder = make_checkpoint(tmp_path / "one")
    names = open_checkpoint(folder).tensors.keys()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert open_checkpoint(folder).tensors.keys() == names


# --- paths


def test_path_that_is_a_file(single):
    assert "is a file; a checkpoint is the folder" in refusal(single / "config.json")


def test_weight_file_that_is_a_folder_or_a_pipe(single):
    """A process that opens a named pipe hangs."""
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").mkdir()
    assert "not an ordinary file" in refusal(single)
    (single / "model.safetensors").rmdir()
    os.mkfifo(single / "model.safetensors")
    assert "not an ordinary file" in refusal(single)


@pytest.mark.parametrize("file", [".", "config.json", "model.safetensors"])
def test_symlink_loops(tmp_path, single, file):
    if file == ".":
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        assert "Too many levels of symbolic links" in refusal(tmp_path / "loop")
    else:
        (single / file).unlink()
        (single / file).symlink_to(single / file)
        assert file in refusal(single)


def test_links_to_files_elsewhere_are_ordinary(tmp_path, single):
    """The hub's own cache is made of them."""
    shutil.move(single / "model.safetensors", tmp_path / "blob")
    (single / "model.safetensors").symlink_to(tmp_path / "blob")
    assert len(open_checkpoint(single).tensors) == 27


@pytest.mark.parametrize("locked", [".", "config.json", "model.safetensors", "generation_config.json"])
def test_no_rights(locked):
    """As an ordinary user: root may read everything, so a root test run steps down in a child process."""
    with tempfile.TemporaryDirectory() as parent:
        folder = make_checkpoint(Path(parent) / "m")
        (folder / "generation_config.json").write_text("{}")
        open_checkpoint(folder)
        for path in (Path(parent), folder, *folder.iterdir()):
            path.chmod(0o755)
        os.chmod(folder / locked, 0)
        message = _as_ordinary_user(lambda: refusal(folder))
        os.chmod(folder / locked, 0o755)
    assert "ermission" in message and str(folder) in message


def _as_ordinary_user(call):
    if os.geteuid() != 0:
        return call()
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(65534)
            os.write(send, call().encode())
        finally:
            os._exit(0)
    os.close(send)
    os.waitpid(child, 0)
    with os.fdopen(receive) as pipe:
        return pipe.read()


# --- checksums


def test_flipped_byte_in_the_data_is_found_by_its_sum(sharded):
    write_sums(sharded)
    open_checkpoint(sharded)
    flip(sharded / SECOND, -3)
    assert f"{SECOND} does not match its sum in SHA256SUMS" in refusal(sharded)


@pytest.mark.parametrize("file", ["config.json", INDEX, "generation_config.json", "tokenizer_config.json",
                                  "tokenizer.json", "chat_template.jinja"])
def test_other_files_are_summed_too(sharded, file):
    path = sharded / file
    text = path.read_text() if path.exists() else "{}"
    path.write_text(text)
    write_sums(sharded)
    path.write_text(text + "\n")
    assert f"{file} does not match its sum" in refusal(sharded)


def test_sums_that_leave_out_a_file_or_are_no_sums(sharded):
    write_sums(sharded)
    lines = (sharded / "SHA256SUMS").read_text().splitlines()
    (sharded / "SHA256SUMS").write_text("\n".join(line for line in lines if SECOND not in line))
    assert f"{SECOND} is not listed in SHA256SUMS" in refusal(sharded)
    short, whole = b"a" * 63, b"a" * 64
    for line in (b"hello", b"\xff\xfe  config.json", short + b"  config.json", whole + b"  ", whole + b" config.json"):
        (sharded / "SHA256SUMS").write_bytes("\n".join(lines[:1]).encode() + b"\n" + line + b"\n")
        assert "SHA256SUMS line 2 is not '<sha256> <file>'" in refusal(sharded)


def test_sums_are_those_of_sha256sum(single):
    (single / "folder").mkdir()
    (single / "SHA256SUMS").write_text("of another time")
    names = ["z.txt", *"fedcba"]
    for name in names:
        (single / name).write_text(name)
    write_sums(single)
    assert (single / "SHA256SUMS").read_text() == "".join(
        f"{hashlib.sha256((single / name).read_bytes()).hexdigest()}  {name}\n"
        for name in sorted([*names, "config.json", "generation_config.json", "model.safetensors"])
        if (single / name).exists())
    flip(single / "model.safetensors", -3)
    assert "model.safetensors does not match its sum" in refusal(single)


def count_looks(monkeypatch):
    looks = []
    real = verify._sha256
    monkeypatch.setattr(verify, "_sha256", lambda path: looks.append(path.name) or real(path))
    return looks


def test_data_is_verified_once_and_again_after_any_change(sharded, monkeypatch):
    write_sums(sharded)
    age(sharded)
    looks = count_looks(monkeypatch)
    open_checkpoint(sharded)
    assert sorted(looks) == ["config.json", FIRST, SECOND, INDEX]
    looks.clear()
    monkeypatch.chdir(sharded.parent)
    for name in (sharded, sharded.name):
        open_checkpoint(name)
    assert looks == []
    before = os.stat(sharded / SECOND)
    flip(sharded / SECOND, -3)
    os.utime(sharded / SECOND, ns=(before.st_atime_ns, before.st_mtime_ns))  # even with its old time put back
    assert f"{SECOND} does not match its sum" in refusal(sharded)


def test_files_too_young_to_trust_their_times_are_verified_every_time(sharded, monkeypatch):
    write_sums(sharded)
    looks = count_looks(monkeypatch)
    open_checkpoint(sharded)
    open_checkpoint(sharded)
    assert len(looks) == 8
    age(sharded)
    os.utime(sharded / SECOND, (time.time() + 60,) * 2)  # one such file is enough
    open_checkpoint(sharded)
    open_checkpoint(sharded)
    assert len(looks) == 16


@pytest.mark.parametrize("note", [b"", b"[]", b"{", b"\xff", b'{"config.json": 1}'])
def test_a_damaged_note_only_means_looking_again(sharded, tmp_path, monkeypatch, note):
    write_sums(sharded)
    age(sharded)
    open_checkpoint(sharded)
    for path in (tmp_path / "cache" / "verified").iterdir():
        path.write_bytes(note)
    looks = count_looks(monkeypatch)
    open_checkpoint(sharded)
    assert len(looks) == 4


def test_a_cache_that_cannot_be_written_only_means_looking_again(sharded, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path / "file"))
    age(sharded)
    open_checkpoint(sharded)


def test_a_flipped_byte_in_fable_is_found(tmp_path):
    folder = tmp_path / "fable"
    shutil.copytree(open_checkpoint("fable").folder, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    flip(shard, shard.stat().st_size // 2)
    assert f"{shard.name} does not match its sum" in refusal(folder)
