"""Which tensor lies in which safetensors file, read from the files' headers and the index."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError, words_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NARROW = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}  # read with scales, see quantised.py
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# Rotary tables that old checkpoints stored; they follow from config.json and Hugging Face ignores them too.
_NOT_A_WEIGHT = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: its full ``shape``, its ``dtype`` as stored, the ``file`` name in the folder.

    ``scale``: of a quantised tensor, its :class:`tplab.checkpoint.quantised.Scale`; ``dtype`` is then what is read.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    scale: Any = None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ``CheckpointError`` naming the file when it is anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read: {words_of(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.parent}: {path.name} holds a JSON {type(content).__name__}, not an object")
    return content


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """All weights of the checkpoint, by name. Only headers are read, never data.

    Follows Hugging Face's layout: ``model.safetensors``, or several files named by ``model.safetensors.index.json``.
    Raises ``CheckpointError`` for pickled weights, a missing or damaged file, a tensor held twice, and dtypes that are
    not read.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in _weight_files(folder):
        header = _header(folder, file)
        if twice := next((name for name in header if name in tensors), None):
            raise CheckpointError(f"{folder}: tensor {twice} is in two files, {tensors[twice].file} and {file}")
        tensors |= header
    _check_dtypes(folder, tensors)
    return tensors


def _weight_files(folder: Path) -> list[str]:
    present = set(os.listdir(folder))
    if SINGLE in present:
        return [SINGLE]
    if INDEX not in present:
        if pickled := sorted(file for file in present if file.endswith(PICKLED)):
            raise CheckpointError(f"{folder}: pickled weights ({pickled[0]}) are not read, because a pickle can run "
                                  "code; save as safetensors")
        raise CheckpointError(f"{folder}: no weights here: neither {SINGLE} nor {INDEX}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder}: {INDEX} has no weight_map")
    for tensor, file in weight_map.items():
        # A separator or '..' would let an index read files outside its folder.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", file):
            raise CheckpointError(f"{folder}: {INDEX} puts {tensor} into {file!r}; only .safetensors files of this "
                                  "folder are read")
    return sorted(set(weight_map.values()))


def _header(folder: Path, file: str) -> dict[str, TensorInfo]:
    path, infos = folder / file, {}
    if not path.is_file():  # before opening: a named pipe would block for ever
        raise CheckpointError(f"{folder}: weight file {file} is missing, or not an ordinary file")
    dtypes = DTYPES | {stored_as: dtype for dtype, stored_as in NARROW.items()}
    try:
        path.open("rb").close()  # safetensors calls a file without permission "no such file"
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():
                piece = opened.get_slice(name)
                if not _NOT_A_WEIGHT.search(name):
                    if (stored_as := piece.get_dtype()) not in dtypes:
                        raise CheckpointError(f"{folder}: {name} in {file} is stored as {stored_as}; what is read is "
                                              f"{', '.join(dtypes)}")
                    infos[name] = TensorInfo(tuple(piece.get_shape()), dtypes[stored_as], file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: {file} is damaged or unreadable: {words_of(error)}") from error
    return infos


def _check_dtypes(folder: Path, tensors: dict[str, TensorInfo]) -> None:
    # float32 norms beside half-precision matrices are ordinary; the two half precisions never mix, and one
    # read as the other gives numbers that look almost sensible.
    first = {info.dtype: name for name, info in reversed(tensors.items())}
    if torch.float16 in first and torch.bfloat16 in first:
        raise CheckpointError(f"{folder}: wrong dtype: {first[torch.float16]} is float16 while {first[torch.bfloat16]} "
                              "is bfloat16")
