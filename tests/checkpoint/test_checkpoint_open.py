"""What is found under a name, and that what is accepted is exactly what Hugging Face would load."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import ROPES, make_checkpoint, random_tensors, save_tensors, shapes
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tplab.checkpoint import CheckpointError, ModelConfig, cache_dir, open_checkpoint
from tplab.checkpoint.layout import HEAD, expected_shapes
from tplab.checkpoint.random_weights import write_random

LLAMAS = ("qwen2", "qwen3", "llama", "mistral")  # tests/model has the others, as transformers saves them


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("model_type", LLAMAS)
@pytest.mark.parametrize("bias", [True, False])
def test_expected_tensors_are_those_of_hugging_face(model_type, tie, bias):
    """Red when a bias, a norm or a size is promised that HF does not have, or the other way round."""
    hf = AutoConfig.for_model(
        model_type,
        num_hidden_layers=2,
        hidden_size=24,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        intermediate_size=29,
        vocab_size=31,
        tie_word_embeddings=tie,
        attention_bias=bias,
        mlp_bias=bias,
        sliding_window=None,
    )
    with torch.device("meta"):
        theirs = {name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(hf).state_dict().items()}
    if tie:
        del theirs[HEAD]  # the state dict lists the embedding a second time under this name
    assert expected_shapes(ModelConfig.from_hf(hf), ()) == theirs


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("model_type", LLAMAS)
def test_every_architecture_and_rope_opens(tmp_path, model_type, rope):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", model_type, rope=rope, shards=2))
    c = ckpt.config
    assert (c.model_type, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim) == (model_type, 2, 4, 2, 8)
    assert (c.hidden_size, c.intermediate_size, c.vocab_size) == (32, 43, 67)
    assert c.hf.rope_parameters == ROPES[rope]
    assert c.qkv_bias == (model_type == "qwen2") and c.qk_norm == (model_type == "qwen3")
    assert not c.o_bias and not c.mlp_bias and not c.tie_word_embeddings
    assert {info.file for info in ckpt.tensors.values()} == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}


@pytest.mark.parametrize("name", shapes())
def test_real_head_layouts_open_and_hugging_face_loads_them(tmp_path, name):
    folder = make_checkpoint(tmp_path / "m", **shapes()[name])
    config = open_checkpoint(folder).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == tuple(
        shapes()[name][key] for key in ("heads", "kv_heads", "head_dim")
    )
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    with torch.inference_mode():
        logits = model(torch.arange(12)[None]).logits
    assert 1 < logits.abs().max() < 30


def test_biases_follow_the_config(tmp_path):
    llama = open_checkpoint(make_checkpoint(tmp_path / "a", "llama", attention_bias=True, mlp_bias=True)).config
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias
    qwen3 = open_checkpoint(make_checkpoint(tmp_path / "b", "qwen3", attention_bias=True)).config
    assert qwen3.qkv_bias and qwen3.o_bias and not qwen3.mlp_bias


@pytest.mark.parametrize("attention, mlp", [(False, False), (True, False), (False, True), (True, True)])
def test_the_biases_of_attention_and_of_the_mlp_are_two_things(attention, mlp):
    made = ModelConfig.from_hf(AutoConfig.for_model("llama", attention_bias=attention, mlp_bias=mlp))
    assert (made.qkv_bias, made.o_bias, made.mlp_bias) == (attention, attention, mlp)


def test_random_weights_hide_nothing(tmp_path):
    """The factory's own promise: no zero bias, no norm of ones, no two tensors alike."""
    tensors = load_file(make_checkpoint(tmp_path / "m", "qwen2") / "model.safetensors")
    for name, tensor in tensors.items():
        assert tensor.std() > 0.05, name
        assert not any(torch.equal(tensor, other) for key, other in tensors.items() if key != name)


def test_fused_and_separate_hold_the_same_rows(tmp_path):
    plain = load_file(make_checkpoint(tmp_path / "plain", "llama", attention_bias=True) / "model.safetensors")
    folder = make_checkpoint(tmp_path / "fused", "llama", attention_bias=True, fused_qkv=True, fused_gate_up=True)
    ckpt = open_checkpoint(folder)
    attn, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert f"{attn}.q_proj.weight" not in ckpt.tensors
    with ckpt.reader() as reader:
        fused = reader[f"{attn}.qkv_proj.weight"]
        assert torch.equal(fused[32:48], plain[f"{attn}.k_proj.weight"])
        assert torch.equal(reader[f"{attn}.qkv_proj.bias"][48:64], plain[f"{attn}.v_proj.bias"])
        assert torch.equal(reader[f"{mlp}.gate_up_proj.weight"][43:], plain[f"{mlp}.up_proj.weight"])


def test_a_stored_copy_of_a_tied_head_is_dropped_when_equal_and_refused_when_not(tmp_path):
    folder = make_checkpoint(tmp_path / "m", tie=True)
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors["model.embed_tokens.weight"].clone()
    save_tensors(folder, tensors)
    assert HEAD not in open_checkpoint(folder).tensors
    tensors[HEAD][5, 7] += 1e-3
    save_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
        open_checkpoint(folder)


def test_rotary_tables_of_old_checkpoints_are_ignored(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_tensors(folder, tensors, shards=2)
    (folder / "model.safetensors").unlink()
    assert not any("inv_freq" in name for name in open_checkpoint(folder).tensors)


def test_eos_ids_come_from_generation_config_first(tmp_path):
    folder = make_checkpoint(tmp_path / "m", eos_token_id=3)
    assert open_checkpoint(folder).config.eos_token_ids == (3,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert open_checkpoint(folder).config.eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert open_checkpoint(folder).config.eos_token_ids == (0,)


def test_a_checkpoint_travels_to_a_rank_without_its_tokenizer(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m"))
    ckpt._tokenizer = lambda: "something that cannot be pickled"
    copy = pickle.loads(pickle.dumps(ckpt))
    assert (copy.name, copy.folder, copy.config, copy.tensors) == (ckpt.name, ckpt.folder, ckpt.config, ckpt.tensors)
    assert copy.config.hf.rope_parameters == ckpt.config.hf.rope_parameters
    with copy.reader() as reader:
        assert reader[HEAD][:].shape == (67, 32)


def test_the_state_of_a_checkpoint_is_its_folder_and_every_file_as_it_was(tmp_path):
    """What is made of a checkpoint is kept by this key, and must be made again when any file has changed."""
    folder = make_checkpoint(tmp_path / "m", shards=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    shutil.copytree(folder, tmp_path / "links", copy_function=os.link)  # the very same files under another name
    first, other = open_checkpoint(folder), open_checkpoint(tmp_path / "links")
    files = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)] + ["config.json", "generation_config.json"]
    assert [name for name, _ in first.state[1:]] == files and hash(first.state) == hash(open_checkpoint(folder).state)
    assert first.state[0] == folder and first.state[1:] == other.state[1:] and first.state != other.state
    first.check_unchanged()
    for file in ("config.json", "generation_config.json", files[2]):
        opened = open_checkpoint(folder)
        stored = (folder / file).read_bytes()
        (folder / file).write_bytes(stored + b" " if file.endswith("json") else stored)  # the latter as it was
        with pytest.raises(CheckpointError, match=f"{file} has changed since the checkpoint was opened"):
            opened.check_unchanged()
        assert open_checkpoint(folder).state != opened.state


def test_the_embedded_fable_opens():
    ckpt = open_checkpoint("fable")
    assert ckpt.config.model_type == "qwen2" and ckpt.config.num_heads == 8 and ckpt.config.num_kv_heads == 2
    assert (ckpt.folder / "SHA256SUMS").exists()


def test_a_checkpoint_opened_by_a_relative_name_is_read_from_anywhere(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    ckpt = open_checkpoint("m")
    monkeypatch.chdir("/")
    with ckpt.reader() as reader:
        assert reader["model.norm.weight"][:].isfinite().all()


def test_smollm2_before_it_was_fetched_names_the_command():
    with pytest.raises(CheckpointError, match="python -m tplab fetch smollm2"):
        open_checkpoint("smollm2")


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("TPLAB_CACHE", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.setenv("TPLAB_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"
    for set_to_nothing in (lambda name: monkeypatch.setenv(name, ""), monkeypatch.delenv):
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        set_to_nothing("TPLAB_CACHE")
        assert cache_dir() == Path("/xdg/tplab")
        set_to_nothing("XDG_CACHE_HOME")
        assert cache_dir() == Path.home() / ".cache" / "tplab"


def test_a_name_of_any_kind_and_a_folder_that_looks_like_a_hub_id(tmp_path, monkeypatch):
    assert open_checkpoint(b"fable").folder == open_checkpoint("fable").folder
    assert repr(open_checkpoint(b"fable")) == (
        "<Checkpoint fable: qwen2, 6 layers, 8 query and 2 KV heads of 16, vocabulary 768>")
    make_checkpoint(tmp_path / "own" / "m")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("own/m").folder == open_checkpoint(Path("own/m")).folder == tmp_path / "own" / "m"
    for name in ("own/link", "own/m/config.json/x"):
        with pytest.raises(CheckpointError, match=f"there is no folder '{name}'"):
            open_checkpoint(name)


def test_a_home_folder_of_no_user(monkeypatch):
    with pytest.raises(CheckpointError, match="'~nosuchuser/m', but there is no user here with the home"
                                              " folder '~nosuchuser'"):
        open_checkpoint("~nosuchuser/m")
    monkeypatch.setenv("TPLAB_CACHE", "~nosuchuser/cache")
    with pytest.raises(CheckpointError, match="TPLAB_CACHE is '~nosuchuser/cache', but there is no user here with"):
        open_checkpoint("smollm2")


@pytest.mark.parametrize("model", [None, 5, [], True], ids=str)
def test_what_is_no_name_of_a_model(model):
    with pytest.raises(CheckpointError, match="a model is 'fable', .*, not"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "model name is empty"),
        ("fabel", "no folder 'fabel'; did you mean 'fable'"),
        ("x", "no folder 'x'; a model is 'fable', 'fable-moe', 'smollm2', a folder, or a hub id"),
        ("./some/where", "no folder './some/where'"),
        ("a\0b", "null"),
        ("x" * 5000, "too long"),
        ("../../../../x/y", "no folder"),
        ("modèle/x", "no folder 'modèle/x'"),
    ],
)
def test_a_name_that_means_nothing_says_what_would_work(name, words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(name)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 900 and "\n" not in str(caught.value)


def test_a_hub_model_that_cannot_be_reached_names_the_remedies(tmp_path, monkeypatch):
    """In a process of its own: the hub library reads its environment when it is imported."""
    code = "from tplab.checkpoint import *\ntry: open_checkpoint('someone/model-1')\n" \
           "except CheckpointError as e: print(e)"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert "hub model 'someone/model-1' is not in the local hub cache" in run.stdout, run.stderr
    assert "'fable'" in run.stdout


def refuse_entry(*_):
    raise PermissionError(13, "Permission denied", "the path itself")


def test_a_folder_that_may_not_be_listed_or_goes_while_it_is_looked_at(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "m")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse_entry)
        with pytest.raises(CheckpointError, match=f"'{folder}' cannot be opened: Permission denied$"):
            open_checkpoint(folder)
    monkeypatch.setattr("tplab.checkpoint.checkpoint.read_headers", lambda folder: os.listdir(folder / "gone"))
    with pytest.raises(CheckpointError, match=rf"{folder} cannot be read: \[Errno 2\]"):
        open_checkpoint(folder)


def test_hub_ids_are_downloaded_by_name_without_pickles(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "m")
    asked = {}

    def snapshot_download(repo_id, allow_patterns):
        asked[repo_id] = allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert open_checkpoint("Someone/Model-1").folder == folder
    assert list(asked) == ["Someone/Model-1"]
    patterns = asked["Someone/Model-1"]
    for file in ("config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
                 "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                 "chat_template.jinja", "SHA256SUMS"):
        assert any(fnmatch(file, pattern) for pattern in patterns), file
    for file in ("pytorch_model.bin", "model.pt", "modeling_own.py", "model.gguf", "original/model.safetensors.bin"):
        assert not any(fnmatch(file, pattern) for pattern in patterns), file


def test_importing_the_room_does_not_import_transformers():
    code = "import sys, tplab.checkpoint; print('transformers' in sys.modules, 'huggingface_hub' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["False", "False"], run.stdout + run.stderr


def test_random_tensors_depend_on_the_seed():
    config = ModelConfig.from_hf(AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=8,
                                                      num_attention_heads=2,
                                                      num_key_value_heads=1, intermediate_size=8, vocab_size=9))
    name = "model.norm.weight"
    assert torch.equal(random_tensors(config, 1)[name], random_tensors(config, 1)[name])
    assert not torch.equal(random_tensors(config, 1)[name], random_tensors(config, 2)[name])


def test_a_random_checkpoint_is_that_of_its_seed_and_an_untied_embedding_of_order_one(tmp_path):
    sizes = dict(model_type="llama", num_hidden_layers=1, hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
                 intermediate_size=8, vocab_size=99)
    for tied, spread in (False, 1), (True, 3 / 8):
        folder = write_random(tmp_path / f"{tied}", 7, tie_word_embeddings=tied, **sizes)
        opened = open_checkpoint(folder)
        with opened.reader() as reader:
            for name, tensor in random_tensors(opened.config, 7).items():
                assert torch.equal(reader[name][:], tensor), name
            assert float(reader["model.norm.weight"][:].mean()) == pytest.approx(1, abs=0.2)
            assert float(reader["model.embed_tokens.weight"][:].std()) == pytest.approx(spread, rel=0.05)
