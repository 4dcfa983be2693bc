"""A checkpoint: a folder that was checked when it was opened."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .config import CONFIGS, ModelConfig, read_config
from .errors import CheckpointError
from .headers import TensorInfo, read_headers
from .layout import HEAD, check_tensors
from .names import resolve
from .quantised import with_scales
from .reader import CheckpointReader, Stat, check_unchanged, file_stat
from .tokenizer import load_tokenizer
from .verify import verify_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Checkpoint:
    """What :func:`open_checkpoint` returns. Holds no open file and no data; can be pickled to ranks.

    ``name`` as asked for; ``folder``; ``config`` (:class:`ModelConfig`); ``tensors``: every weight's
    :class:`TensorInfo` by name. A copy of a tied head is not among them: the head is the embedding.
    """

    def __init__(self, name: str, folder: Path, config: ModelConfig, tensors: dict[str, TensorInfo],
                 stats: dict[str, Stat]):
        self.name, self.folder, self.config, self.tensors = name, folder, config, tensors
        self._stats = stats
        self._tokenizer: PreTrainedTokenizerFast | None = None

    def reader(self) -> CheckpointReader:
        """A context manager that reads slices of tensors; for one process, so each rank makes its own."""
        return CheckpointReader(self.folder, self.tensors, self._stats)

    @property
    def state(self) -> tuple:
        """A key for what is made of config and weights: the folder, and each file's name and :func:`file_stat`."""
        return self.folder, *self._stats.items()

    def check_unchanged(self) -> None:
        """Raise ``CheckpointError`` if config or weights are not those that were opened."""
        for file, stat in self._stats.items():
            check_unchanged(self.folder, file, stat)

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
    """Find the checkpoint called ``name`` and check it: headers, config, and, once per file, the data.

    ``name`` is ``"fable"``, ``"fable-moe"``, ``"smollm2"``, a local folder, or a hub id; an open
    checkpoint is returned as it is. A folder that is unsupported, incomplete, damaged or contradicts itself is a
    ``CheckpointError`` here, before a rank starts. The first opening reads all data for :func:`verify_once`; later ones
    read headers only.
    """
    if isinstance(name, Checkpoint):
        return name
    folder = resolve(name)
    try:
        stored = read_headers(folder)
        config = read_config(folder, len(stored))
        tensors = with_scales(folder, stored, config.scale_block)
        check_tensors(folder, config, tensors)
        files = sorted({info.file for info in stored.values()}) + [f for f in CONFIGS if (folder / f).exists()]
        stats = {file: file_stat(folder / file) for file in files}
        verify_once(folder, config, tensors, stats)
    except OSError as error:  # no permission for one of the files, or it went away in the meantime
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if config.tie_word_embeddings:
        tensors.pop(HEAD, None)  # verify_once saw that it equals the embedding
    return Checkpoint(os.fsdecode(name), folder.absolute(), config, tensors, stats)  # ranks may work elsewhere
