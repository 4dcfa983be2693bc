"""What tplab cannot run, or will not, is refused by name when the checkpoint is opened."""

import json

import pytest
from helpers.checkpoints import bounded_memory, make_checkpoint, save_tensors
from safetensors.torch import load_file

from tplab.checkpoint import CheckpointError, open_checkpoint


@pytest.fixture(autouse=True)
def little_memory():
    with bounded_memory():
        yield


def edit(folder, file="config.json", **changes):
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))
    return folder


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2,
          "num_experts_per_tok": 3}, "cannot go to 3 of 2 experts"),
        ({"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
         "use_bidirectional_attention is True"),
        ({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 5.0},
         "attn_logit_softcapping is 5.0, for which a gemma3_text has no trait here; None works"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported; tplab runs qwen2, qwen3, llama, mistral, gemma, "),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq)"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope 'mrope' cannot be set up"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope 'su' cannot be set up"),
        ({"rope_parameters": YARN}, "'factor'"),
        ({"rope_parameters": YARN | {"factor": float("nan")}}, "finite frequency"),
        ({"rope_parameters": YARN | {"factor": 4.0, "attention_factor": "x"}}, "cannot be set up"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "each pair"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta is -1.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "10000"}}, "'10000'"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1, "layer_types": None},
         "a sliding window of 0 tokens is no window"),
        ({"layer_types": ["full_attention", "sliding_attention"]},
         "layer_types has layers with a sliding window, but a qwen2 of this config has none"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "sliding_window": 8,
          "layer_types": ["sliding_attention"] * 2}, "but a llama of this config has none"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": 5}, "layer_types 5"),
        ({"num_hidden_layers": 10**12, "layer_types": None}, "num_hidden_layers is 1000000000000"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"head_dim": 10**11}, "head_dim is 100000000000"),
        ({"head_dim": 7}, "even"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"num_attention_heads": 0, "head_dim": None}, "0 heads"),
        ({"num_key_value_heads": True}, "True"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"vocab_size": 67.5}, "vocab_size"),
        ({"hidden_act": "swiglu2"}, "'swiglu2' is unknown"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
    ids=lambda value: " ".join(f"{k}={v}"[:40] for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_unsupported_configs(tmp_path, changes, words):
    assert words in refusal(edit(make_checkpoint(tmp_path / "m"), **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # sizes that are possible in themselves, but are not those of the weights
        ({"vocab_size": 68},
         "model.embed_tokens.weight in model.safetensors has shape [67, 32], but config.json asks for [68, 32]"),
        ({"hidden_size": 36}, "asks for [67, 36]"),
        ({"num_attention_heads": 2}, "q_proj.weight"),
        ({"num_key_value_heads": 4}, "k_proj.weight"),
        ({"head_dim": 16}, "asks for [64, 32]"),
        ({"intermediate_size": 44}, "mlp.gate_proj.weight"),
        ({"num_hidden_layers": 3, "layer_types": None}, "model.layers.2.input_layernorm.weight and 11 more missing"),
        ({"num_hidden_layers": 1, "layer_types": None}, "unexpected tensor model.layers.1."),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
         "unexpected tensor model.layers.0.self_attn.k_proj.bias"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
         "model.layers.0.self_attn.q_norm.weight and 3 more missing"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
    ids=str,
)
def test_configs_that_contradict_the_weights(tmp_path, changes, words):
    assert words in refusal(edit(make_checkpoint(tmp_path / "m"), **changes))


@pytest.mark.parametrize("changes", [
    {"architectures": None}, {"quantization_config": None}, {"rope_scaling": None, "layer_types": None},
    # Qwen2.5's published configs carry a window with use_sliding_window=false.
    {"use_sliding_window": False, "sliding_window": 16, "layer_types": None},
    # Code that a checkpoint brings along is never run.
    {"auto_map": {"AutoConfig": "configuration_qwen2.Qwen2Config", "AutoModelForCausalLM": "m.Qwen2ForCausalLM"}},
], ids=str)
def test_configs_that_say_nothing_out_of_the_ordinary(tmp_path, changes):
    config = open_checkpoint(edit(make_checkpoint(tmp_path / "m"), **changes)).config
    assert config.num_layers == 2 and not config.traits


@pytest.mark.parametrize(("window", "longest", "active"),
                         [(4096, 32768, True), (None, 32768, False), (4096, 4096, False)])
def test_mistral_windows_count_where_they_hide_something(tmp_path, window, longest, active):
    folder = edit(make_checkpoint(tmp_path / "m", "mistral"), sliding_window=window, max_position_embeddings=longest)
    config = open_checkpoint(folder).config
    assert config.windows == ((window if active else None),) * 2
    assert config.traits == (["a sliding window"] if active else [])


def test_an_untied_checkpoint_without_a_head(tmp_path):
    folder = edit(make_checkpoint(tmp_path / "m", tie=True), tie_word_embeddings=False)
    assert "lm_head.weight missing (the config does not tie" in refusal(folder)
    save_tensors(folder, {name: tensor for name, tensor in load_file(folder / "model.safetensors").items()
                          if name != "model.norm.weight"})
    assert "model.norm.weight and 1 more missing (the config does not tie" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a": "\xff\xfe"}', None])
def test_a_config_that_is_no_json_object(tmp_path, content):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    assert "config.json" in refusal(folder)


def test_weights_that_are_not_safetensors(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.gguf")
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(folder)
    for name in ("b.pth", "a.bin"):
        (folder / name).touch()
    assert "pickled weights (a.bin) are not read, because a pickle can run code" in refusal(folder)
