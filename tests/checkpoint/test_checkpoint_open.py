"""What is found under a name, and that what is accepted is exactly what Hugging Face would load."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import ROPES, make_checkpoint, save_tensors, shapes
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tplab.checkpoint import CheckpointError, ModelConfig, cache_dir, open_checkpoint
from tplab.checkpoint.layout import HEAD, expected_shapes


@pytest.mark.parametrize("model_type, tie, bias", [
    ("qwen2", True, False), ("qwen2", False, True), ("qwen3", True, True), ("llama", True, False),
    ("llama", False, True), ("mistral", False, False)])
def test_expected_tensors_are_those_of_hugging_face(model_type, tie, bias):
    """Red when a bias, a norm or a size is promised that HF does not have, or the other way round."""
    hf = AutoConfig.for_model(
        model_type, num_hidden_layers=2, hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
        intermediate_size=29, vocab_size=31, tie_word_embeddings=tie, attention_bias=bias, mlp_bias=bias,
        sliding_window=None)
    with torch.device("meta"):
        theirs = {name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(hf).state_dict().items()}
    if tie:
        del theirs[HEAD]  # the state dict lists the embedding a second time under this name
    assert expected_shapes(ModelConfig.from_hf(hf), ()) == theirs


@pytest.mark.parametrize("name, rope", list(zip(shapes(), [*ROPES, "default", "default"])))
def test_real_head_layouts_open_with_any_rope_and_hugging_face_loads_them(tmp_path, name, rope):
    folder = make_checkpoint(tmp_path / "m", **shapes()[name] | {"rope": rope, "shards": 2})
    config = open_checkpoint(folder).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == tuple(
        shapes()[name][key] for key in ("heads", "kv_heads", "head_dim")
    )
    assert config.hf.rope_parameters == ROPES[rope]
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    with torch.inference_mode():
        logits = model(torch.arange(12)[None]).logits
    assert 1 < logits.abs().max() < 30


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


def test_eos_ids_come_from_generation_config_first(tmp_path):
    folder = make_checkpoint(tmp_path / "m", eos_token_id=3)
    assert open_checkpoint(folder).config.eos_token_ids == (3,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert open_checkpoint(folder).config.eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert open_checkpoint(folder).config.eos_token_ids == (0,)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TPLAB_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"
    monkeypatch.setenv("TPLAB_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/tplab")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "tplab"


def test_a_checkpoint_that_has_changed_has_another_state(tmp_path):
    """What is made of a checkpoint is kept by this key."""
    folder = make_checkpoint(tmp_path / "m", shards=2)
    first = open_checkpoint(folder)
    assert hash(first.state) == hash(open_checkpoint(folder).state) and first.state[0] == folder
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert open_checkpoint(folder).state != first.state


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "model name is empty"),
        ("fabel", "no folder 'fabel'; did you mean 'fable'"),
        ("x", "no folder 'x'; a model is 'fable', 'fable-moe', 'smollm2', a folder, or a hub id"),
        ("./some/where", "no folder './some/where'"),
        ("~nosuchuser/m", "no folder '~nosuchuser/m'"),
        ("a\0b", "no folder 'a"),
        ("x" * 5000, "no folder 'xxx"),
        ("modèle/x", "no folder 'modèle/x'"),
        (b"README", "no folder 'README'"),
        (None, "a model is 'fable', 'fable-moe', 'smollm2'"),
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
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert "hub model 'someone/model-1' is not in the local hub cache" in run.stdout, run.stderr
    assert "'fable'" in run.stdout


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
                 "chat_template.jinja"):
        assert any(fnmatch(file, pattern) for pattern in patterns), file
    for file in ("pytorch_model.bin", "model.pt", "modeling_own.py", "model.gguf", "original/model.safetensors.bin"):
        assert not any(fnmatch(file, pattern) for pattern in patterns), file


def test_without_a_home_folder_the_cache_is_a_temporary_one_which_is_said_once(tmp_path):
    code = ("from tplab.checkpoint import cache_dir, open_checkpoint\nopen_checkpoint('fable').tokenizer()\n"
            "print(cache_dir() == cache_dir(), cache_dir().parent)")
    env = {name: value for name, value in os.environ.items() if name not in ("TPLAB_CACHE", "XDG_CACHE_HOME")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                         env=env | {"HOME": "/no/such/home", "TMPDIR": str(tmp_path)})
    assert run.stdout == f"True {tmp_path}\n"
    assert not [name for name in os.listdir(tmp_path) if name.startswith("tplab")]
    assert run.stderr.count("there is no home folder for a cache") == 1 == run.stderr.count("\n"), run.stderr
