"""A Llama GGUF file turned into an ordinary Hugging Face safetensors folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import CheckpointError

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SPECIAL = 3  # llama.cpp's token type for control tokens


def convert(source: Path, folder: Path) -> None:
    """Write ``source`` into the existing ``folder`` as float32 safetensors with config and tokenizer.

    Reads the file with the ``gguf`` package, not through transformers' own GGUF loading, which also needs
    ``accelerate``, builds the whole model, marks it as quantised, and for this tokenizer guesses the
    pre-tokenizer. A bar on stderr counts tensors. Raises ``CheckpointError`` for a file that is not a Llama with a
    byte-level BPE tokenizer.
    """
    from gguf import GGUFReader
    from huggingface_hub import save_torch_state_dict
    from tqdm import tqdm
    from transformers import GenerationConfig

    reader = GGUFReader(source)
    facts = {key: value.contents() for key, value in reader.fields.items()}
    if facts.get("general.architecture") != "llama" or facts.get("tokenizer.ggml.pre") != "smollm":
        raise CheckpointError(f"{source} is not a Llama GGUF with SmolLM's tokenizer")
    state = dict(tqdm(_weights(reader, facts), "convert", len(reader.tensors), unit="tensors"))
    config = _config(facts, tied="lm_head.weight" not in state)
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
                     pad_token_id=config.pad_token_id).save_pretrained(folder)
    _tokenizer(facts).save_pretrained(folder)
    save_torch_state_dict(state, folder, max_shard_size="200MB", metadata={"format": "pt"})


def _weights(reader: Any, facts: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf.quants import dequantize

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        kind = parts[-2]
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind in heads:
            weight = _halves(weight, heads[kind])
        yield f"{layer}{_TENSORS[kind]}.{parts[-1]}", torch.from_numpy(np.ascontiguousarray(weight))


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order: its RoPE turns neighbouring rows, Hugging Face's the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(facts: dict[str, Any], tied: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        # GGUF keeps float32; 1e-5 comes back as 9.999999747378752e-06 unless shortened as a float32.
        rms_norm_eps=float(str(np.float32(facts["llama.attention.layer_norm_rms_epsilon"]))),
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        dtype=torch.float32,
    )


def _tokenizer(facts: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's "smollm" pre-tokenizer: every digit alone, the rest cut like GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds) if kind == _SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=tokens[facts["tokenizer.ggml.bos_token_id"]],
                                   eos_token=tokens[facts["tokenizer.ggml.eos_token_id"]],
                                   pad_token=tokens[facts["tokenizer.ggml.padding_token_id"]],
                                   unk_token=tokens[facts["tokenizer.ggml.unknown_token_id"]],
                                   model_max_length=facts["llama.context_length"],
                                   chat_template=facts["tokenizer.chat_template"], clean_up_tokenization_spaces=False)
