"""A checkpoint: a folder that was checked when it was opened."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .config import CONFIGS, ModelConfig, read_config
from .errors import CheckpointError
from .headers import TensorInfo, read_headers
from .layout import EMBEDDING, HEAD, check_tensors
from .names import resolve
from .quantised import with_scales
from .reader import CheckpointReader
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Checkpoint:
    """What :func:`open_checkpoint` returns. Holds no open file and no data; can be pickled to ranks.

    ``name`` as asked for; ``folder``; ``config`` (:class:`ModelConfig`); ``tensors``: every weight's
    :class:`TensorInfo` by name. A copy of a tied head is not among them: the head is the embedding. ``state``: a key
    for what is made of config and weights.
    """

    def __init__(self, name: str, folder: Path, config: ModelConfig, tensors: dict[str, TensorInfo], state: tuple):
        self.name, self.folder, self.config, self.tensors, self.state = name, folder, config, tensors, state
        self._tokenizer: PreTrainedTokenizerFast | None = None

    def reader(self) -> CheckpointReader:
        """A context manager that reads slices of tensors; for one process, so each rank makes its own."""
        return CheckpointReader(self.folder, self.tensors)

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The folder's own tokenizer, loaded on first use. Its ids are those of its ``tokenizer.json``.

        Raises ``CheckpointError`` when there is none, or when it belongs to another model.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder, self.config)
        return self._tokenizer

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tokenizer": None}  # megabytes that no rank needs

    def __repr__(self) -> str:
        c = self.config
        experts = f"{c.experts.num_experts} experts, " if c.experts else ""
        return (f"<Checkpoint {self.name}: {c.model_type}, {c.num_layers} layers, {c.num_heads} query and "
                f"{c.num_kv_heads} KV heads of {c.head_dim}, {experts}vocabulary {c.vocab_size}>")


def open_checkpoint(name: str | os.PathLike | Checkpoint) -> Checkpoint:
    """Find the checkpoint called ``name`` and check its config and its files' headers; no weights are read.

    ``name`` is ``"fable"``, ``"fable-moe"``, ``"smollm2"``, a local folder, or a hub id; an open
    checkpoint is returned as it is. A folder that is unsupported, incomplete, damaged or contradicts itself is a
    ``CheckpointError`` here, before a rank starts.
    """
    if isinstance(name, Checkpoint):
        return name
    folder = resolve(name).absolute()  # ranks may work in another folder
    try:
        config = read_config(folder)
        stored = read_headers(folder)
        tensors = with_scales(folder, stored, config.scale_block)
        check_tensors(folder, config, tensors)
        files = {info.file for info in stored.values()} | {file for file in CONFIGS if (folder / file).exists()}
        stats = [(file, os.stat(folder / file)) for file in sorted(files)]
    except OSError as error:  # no permission for one of the files, or it went away in the meantime
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if config.tie_word_embeddings and HEAD in tensors:
        _check_tied(folder, tensors)
        del tensors[HEAD]
    state = folder, *((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
    return Checkpoint(os.fsdecode(name), folder, config, tensors, state)


def _check_tied(folder: Path, tensors: dict[str, TensorInfo]) -> None:
    with CheckpointReader(folder, tensors) as reader:
        same = tensors[HEAD].dtype == tensors[EMBEDDING].dtype and torch.equal(reader[HEAD][:], reader[EMBEDDING][:])
    if not same:
        raise CheckpointError(f"{folder}: {HEAD} differs from {EMBEDDING}, but config.json ties the two")
