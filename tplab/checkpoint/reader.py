"""Slices of tensors, read from disk one at a time."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tplab.checks import counted

from .errors import CheckpointError, words_of
from .headers import TensorInfo
from .quantised import widened


class CheckpointReader:
    """Opens a checkpoint's files lazily and hands out :class:`TensorSlice` by tensor name.

    A context manager, for one process. ``bytes_read`` counts the bytes of every slice taken, so a rank can
    say how much of the checkpoint it asked for; ``get_tensor`` is never called.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo]):
        self.bytes_read = 0
        self._folder, self._tensors = folder, tensors
        self._open_files: dict = {}

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; slices taken so far stay valid."""
        for opened in self._open_files.values():
            opened.__exit__(None, None, None)
        self._open_files.clear()

    def __getitem__(self, name: str) -> "TensorSlice":
        if name not in self._tensors:
            raise CheckpointError(f"{self._folder}: there is no tensor {name}")
        return TensorSlice(self, name, self._tensors[name])

    def _take(self, name: str, info: TensorInfo, index: tuple[slice, ...]) -> torch.Tensor:
        try:
            piece = self._file(info.file).get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            why = words_of(error)
            raise CheckpointError(f"{self._folder}: {name} cannot be read from {info.file}: {why}") from error
        self.bytes_read += piece.numel() * piece.element_size()
        return piece if info.scale is None else widened(piece, index, info.scale, self._take)

    def _file(self, file: str):
        if file not in self._open_files:
            self._open_files[file] = safe_open(self._folder / file, framework="pt").__enter__()
        return self._open_files[file]


class TensorSlice:
    """One tensor on disk: ``shape``, ``dtype``, and rows ``s[a:b]``, columns ``s[:, a:b]`` or all of it ``s[:]``.

    Bounds are exact: unlike Python's, they are never clamped, because a shard that silently came out short
    is the bug this lab is about. Anything but plain slices raises ``IndexError``.
    """

    def __init__(self, reader: CheckpointReader, name: str, info: TensorInfo):
        self._reader, self._name, self._info = reader, name, info
        self.shape, self.dtype = info.shape, info.dtype

    def __repr__(self) -> str:
        return f"<{self._name} {list(self.shape)}, not read>"

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise IndexError(f"{self._name} has {counted(len(self.shape), 'dimension')}, "
                             f"{len(parts)} slices were asked for")
        exact = tuple(self._exact(part, size, dim) for dim, (part, size) in enumerate(zip(parts, self.shape)))
        return self._reader._take(self._name, self._info, exact)

    def _exact(self, part: slice, size: int, dim: int) -> slice:
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise IndexError(f"{self._name} is read by slices a:b without a step, not by {part!r}")
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if not 0 <= start <= stop <= size:
            raise IndexError(f"{self._name}[{start}:{stop}] along dim {dim} is outside 0:{size}")
        return slice(start, stop)
