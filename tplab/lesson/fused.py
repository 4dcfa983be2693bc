"""The same model with its matrices fused on disk, as some checkpoints keep them."""

import shutil
from pathlib import Path

import torch

from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checkpoint.headers import INDEX, SINGLE
from tplab.checkpoint.layout import by_parameter, read_part, tensor_parts
from tplab.checkpoint.verify import SUMS
from tplab.pool.private_folder import make_folder


def fused_copy(ckpt: Checkpoint) -> Checkpoint:
    """A copy with ``q|k|v`` in one ``qkv_proj`` and ``gate|up`` in one ``gate_up_proj``, the numbers as they were, in
    a folder that goes away with this process.

        >>> fused = lesson.fused_copy(ckpt)
        >>> len(ckpt.tensors), len(fused.tensors)
        (74, 44)
    """
    from safetensors.torch import save_file

    folder, tensors = Path(make_folder()), {}
    with ckpt.reader() as reader:
        for path, parts in by_parameter(tensor_parts(ckpt.config, ckpt.tensors)).items():
            name = path if path.startswith("lm_head.") else f"model.{path}"
            tensors[name] = torch.cat([read_part(part, reader) for part in parts.values()])
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    for file in ckpt.folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, SUMS):
            shutil.copy(file, folder)
    return open_checkpoint(folder)
