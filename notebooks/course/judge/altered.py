"""The same model in another form: under another configuration, or with its matrices fused on disk."""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checkpoint.headers import INDEX, SINGLE
from tplab.checkpoint.layout import by_parameter, read_part, tensor_parts


@contextmanager
def changed_config(ckpt: Checkpoint, **changed) -> Iterator[Checkpoint]:
    """A checkpoint with the weights of ``ckpt`` and with some fields of its ``config.json`` changed, for a while."""
    with tempfile.TemporaryDirectory(prefix="tplab-") as name:
        folder = Path(name)
        for file in ckpt.folder.iterdir():
            if file.name != "config.json":
                os.symlink(file.resolve(), folder / file.name)
        config = json.loads((ckpt.folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
        yield open_checkpoint(folder)


def lasting_folder() -> Path:
    """A new folder that goes away with this process."""
    folder = tempfile.mkdtemp(prefix=f"tplab-{os.getpid()}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def fused_copy(ckpt: Checkpoint) -> Checkpoint:
    """A copy with ``q|k|v`` and ``gate|up`` each in one matrix, in a folder that goes away with this process."""
    from safetensors.torch import save_file

    folder, tensors = lasting_folder(), {}
    with ckpt.reader() as reader:
        for path, parts in by_parameter(tensor_parts(ckpt.config, ckpt.tensors)).items():
            name = path if path.startswith("lm_head.") else f"model.{path}"
            tensors[name] = torch.cat([read_part(part, reader) for part in parts.values()])
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    for file in ckpt.folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, "SHA256SUMS"):
            shutil.copy(file, folder)
    return open_checkpoint(folder)
