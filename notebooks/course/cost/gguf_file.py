"""A checkpoint as the GGUF file that llama.cpp reads, without a vocabulary: runs in llama.cpp's own environment, so it
imports nothing of tplab.

``python gguf_file.py FOLDER PATH DTYPE``. The format and the names are those of the package gguf.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # by config's model_type
_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def write_gguf(folder: str, path: str, dtype: str) -> None:
    """Write the checkpoint in ``folder`` to ``path``, its matrices in ``"float32"`` or ``"bfloat16"``.

    NotImplementedError if llama.cpp would not compute what the checkpoint means.
    """
    import gguf

    config = json.loads((Path(folder) / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if config["model_type"] not in _ARCHITECTURES:
        raise NotImplementedError(f"no GGUF is written here for {config['model_type']}")
    scaled = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    if scaled or config.get("use_sliding_window"):
        raise NotImplementedError("no GGUF is written here for a scaled RoPE or a sliding window")
    kind = gguf.MODEL_ARCH[_ARCHITECTURES[config["model_type"]]]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, values in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if kind == gguf.MODEL_ARCH.LLAMA and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = in_pairs(values, heads if ".q_proj." in name else kv_heads)
        stem, _, ending = name.rpartition(".")
        if (known := names.get_name(stem)) is None:
            raise NotImplementedError(f"no GGUF is written here for the tensor {name}")
        there = f"{known}.{ending}"
        if dtype == "bfloat16" and values.ndim == 2:  # llama.cpp keeps vectors in float32
            writer.add_tensor(there, to_bfloat16(values), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(there, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head so that those that RoPE turns together stand together, as Llama's GGUF has them; in Hugging
    Face's checkpoints half a head is between them."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers rounded to bfloat16, to the nearest, ties to even, as bytes along the last axis."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded.astype(np.uint16).view(np.uint8)


def tensors(folder: str) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values, in float32, of all safetensors files in ``folder`` (numpy has no bfloat16)."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, mode="r", offset=8 + size)
        for name, info in header.items():
            if name == "__metadata__":
                continue
            first, end = info["data_offsets"]
            stored = data[first:end].view(_STORED[info["dtype"]]).reshape(info["shape"])
            if info["dtype"] == "BF16":
                yield name, (stored.astype(np.uint32) << 16).view(np.float32)
            else:
                yield name, stored.astype(np.float32)


if __name__ == "__main__":
    write_gguf(*sys.argv[1:])
