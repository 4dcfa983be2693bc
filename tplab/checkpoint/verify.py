"""Checks of the data itself: checksums, NaN, a head that is not tied. Made once per file."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from .config import ModelConfig
from .errors import CheckpointError
from .headers import INDEX, TensorInfo
from .layout import EMBEDDING, HEAD
from .names import cache_dir
from .reader import CheckpointReader, Stat, TensorSlice, file_stat
from .tokenizer import FILE as TOKENIZER
from .tokenizer import check_tokenizer, read_own_tokenizer

SUMS = "SHA256SUMS"
_SIDE_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", TOKENIZER,
               INDEX, SUMS)
_CHUNK_ELEMENTS = 1 << 22
# A change within one tick of the clock after a check leaves the file's time as it was. So files that were changed
# less than this before are checked again next time.
_SETTLED_NS = 2_000_000_000


def verify_once(folder: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo],
                stats: Mapping[str, Stat]) -> None:
    """Check the data of a checkpoint whose headers are in order, unless these very files passed before.

    Every file listed in ``SHA256SUMS`` (if there is one) has its sum, and every file in use is listed; every
    weight is finite; a stored copy of a tied head equals the embedding; the tokenizer fits the config.
    ``stats`` is the :func:`file_stat` of each weight file when its header was read.

    What passed is noted in the user's cache with each file's size, times and inode, so that the next opening
    costs a few ``stat`` calls. Raises ``CheckpointError`` naming the file or tensor.
    """
    beside = {file: file_stat(folder / file) for file in _SIDE_FILES if (folder / file).is_file()}
    state = {file: list(stat) for file, stat in {**stats, **beside}.items()}
    note = _note_path(folder)
    if _noted(note) == state:
        return
    if SUMS in state:
        _check_sums(folder, [file for file in state if file != SUMS])
    if TOKENIZER in state:
        check_tokenizer(folder, config, read_own_tokenizer(folder))
    with CheckpointReader(folder, tensors, stats) as reader:
        for name in tensors:
            _check_finite(folder, name, reader[name])
        if config.tie_word_embeddings and HEAD in tensors:
            _check_tied(folder, reader)
    if time.time_ns() - max(times[1] for times in state.values()) > _SETTLED_NS:
        _write_note(note, state)


def write_sums(folder: Path) -> None:
    """Write ``SHA256SUMS`` over all other files of ``folder``, in the format of ``sha256sum``."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    (folder / SUMS).write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in files), encoding="utf-8")


def _check_sums(folder: Path, used: list[str]) -> None:
    listed = {}
    for number, line in enumerate((folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        digest, _, file = line.partition("  ")
        if len(digest) != 64 or not file:
            raise CheckpointError(f"{folder}: {SUMS} line {number} is not '<sha256>  <file>'")
        listed[file] = digest
    for file in used:
        if file not in listed:
            raise CheckpointError(f"{folder}: {file} is not listed in {SUMS}")
        if _sha256(folder / file) != listed[file]:
            raise CheckpointError(f"{folder}: {file} does not match its sum in {SUMS}; fetch or copy the folder again, "
                                  f"or, if the change was meant, remove {SUMS}")


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _chunks(tensor: TensorSlice) -> Iterator[slice]:
    width = max(1, torch.Size(tensor.shape[1:]).numel())
    rows = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, min(start + rows, tensor.shape[0]))


def _check_finite(folder: Path, name: str, tensor: TensorSlice) -> None:
    for rows in _chunks(tensor):
        low, high = torch.aminmax(tensor[rows])  # both are NaN if anything is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad = "NaN" if low.isnan() else "inf"
            raise CheckpointError(f"{folder}: {name} contains {bad}, first seen in rows {rows.start} to "
                                  f"{rows.stop - 1}")


def _check_tied(folder: Path, reader: CheckpointReader) -> None:
    head, embedding = reader[HEAD], reader[EMBEDDING]
    same = head.dtype == embedding.dtype and all(torch.equal(head[rows], embedding[rows]) for rows in _chunks(head))
    if not same:
        raise CheckpointError(f"{folder}: {HEAD} differs from {EMBEDDING}, but config.json ties the two")


def _note_path(folder: Path) -> Path:
    return cache_dir() / "verified" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"


def _noted(note: Path) -> dict | None:
    with suppress(OSError, ValueError):  # without a note, or with an unreadable one, the data is checked again
        return json.loads(note.read_text(encoding="utf-8"))
    return None


def _write_note(note: Path, state: dict[str, list[int]]) -> None:
    with suppress(OSError):  # without a writable cache every opening checks again, which is only slower
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False, encoding="utf-8") as draft:
            json.dump(state, draft)
        os.replace(draft.name, note)
