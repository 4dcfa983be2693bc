"""Reads the folder that ``tplab/record.py`` wrote: the journals, and the headers of the tensors' files.

A tensor is read when it is asked for. Nothing in a folder is trusted, and nothing is unpickled: whatever the recorder
would not have written is refused.
"""

import json
import math
import os
import re
from pathlib import Path

import torch
from torch import Tensor

from tplab.align.check.recorded import Call, Entry, Recorded, RecordedRank, RecordingError, ordinary
from tplab.checks import shown, whole_number
from tplab.record import DTYPES, VERSION

__all__ = ["Call", "Entry", "Recorded", "RecordedRank", "RecordingError", "read_recorded"]

_DTYPES = {stored: dtype for dtype, stored in DTYPES.items()}
_MANIFEST = "manifest.jsonl"
NOTHING_RAN = ("no watched module ran in this call; a replayed graph (CUDA graphs, torch.compile) calls none: record "
               "the engine while it runs eagerly")
_MAX_MANIFEST = 1 << 28  # bytes: some 1,000 decode steps of a model of 30 layers
_MAX_WORLD = 4096


def read_recorded(folder: str | os.PathLike) -> Recorded:
    """Read and check the folder that ``record(folder, …)`` wrote.

    A recording that was cut off is read as far as it goes. Raises RecordingError, in one sentence that names the
    file, for everything that the recorder would not have written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordingError(f"{folder} is not a folder; give the one that record(...) wrote")
    try:
        return _read(folder)
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {shown(str(error))}") from error


def _read(folder: Path) -> Recorded:
    numbers = sorted(int(hit.group(1)) for path in folder.iterdir()
                     if (hit := re.fullmatch(r"rank(0|[1-9]\d{0,5})", path.name)))
    if not numbers:
        raise RecordingError(f"{folder} holds no recording: there is no rank0, rank1, … in it")
    readers = [reader for number in numbers if (reader := _RankReader(folder, number)).about]
    if not readers:
        raise RecordingError(f"{folder} holds no recording: no rank came to write a line")
    first = readers[0]
    for other in readers[1:]:
        for key, what in ("run", "two runs are mixed"), ("world_size", "the ranks disagree about world_size"):
            if other.about[key] != first.about[key]:
                raise RecordingError(f"{folder}: {what}: rank{first.rank} says {shown(first.about[key])}, "
                                     f"rank{other.rank} {shown(other.about[key])}; record again into a new folder")
    ranks = {reader.rank: reader.read() for reader in readers}
    world_size = first.about["world_size"]
    return Recorded(folder, world_size, tuple(ranks.get(rank) for rank in range(world_size)))


class _Wrong(Exception):
    """What a line says cannot be; the sentence lacks the line."""


class _Draft:
    """One call as its lines come, or the parameters; and the files in which its tensors follow each other."""

    def __init__(self, folder: Path, stem: str):
        self.folder, self.stem = folder, stem
        self.parts, self.entries, self.known = [], [], set()
        self.last, self.stack, self.raised, self.left = "", [], [], {}
        self.said, self.skipped = (None, None, None), False
        self.unseen = False

    def begin(self, file: str, room: int) -> None:
        expected = f"{self.stem}{f'.{len(self.parts)}' if self.parts else ''}.safetensors"
        if file != expected:
            raise _Wrong(f"the next file is {expected}, not {shown(file)}")
        self.parts.append((self.folder / file, 8 + room, []))

    def place(self, key: int, label: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Path, int]:
        """The file and offset of tensor ``key`` of the current file: the next one, or one that came before."""
        if not self.parts:
            raise _Wrong("a tensor comes before its file")
        path, start, tensors = self.parts[-1]
        size = math.prod(shape) * dtype.itemsize
        if key == len(tensors):
            at = tensors[-1][3] if tensors else 0
            tensors.append((label, {"dtype": DTYPES[dtype], "shape": list(shape)}, at, at + size))
        elif key > len(tensors):
            raise _Wrong(f"there are {len(tensors)} tensors in {path.name} yet, so none has the number {key}")
        _, about, begin, end = tensors[key]
        if (about["dtype"], end - begin) != (DTYPES[dtype], size):
            raise _Wrong(f"tensor {key} of {path.name} has another dtype or size")
        return path, start + begin

    def check(self, ended: bool) -> None:
        """Hold the files against the journal; unless the call has ``ended``, the last file may be ahead of it."""
        for path, start, tensors in self.parts:
            whole = ended or path is not self.parts[-1][0]
            size, content = ordinary(path).stat().st_size, tensors[-1][3] if tensors else 0
            needed = start + content if whole or content else 0
            with open(path, "rb") as file:
                room = int.from_bytes(file.read(8), "little")
                if size < needed or whole and size > needed:
                    raise RecordingError(f"{path} has {size:,} bytes; its journal says {needed:,}")
                if not room and not whole:
                    return  # the engine stopped before the header was written
                if room != start - 8:
                    raise RecordingError(f"{path} begins with a header of {room:,} bytes; its journal says "
                                         f"{start - 8:,}")
                header = _json(file.read(room), f"the header of {path}")
            expected = {label: {**about, "data_offsets": [begin, end]} for label, about, begin, end in tensors}
            for name in (*expected, *(header if whole else ())):
                if header.get(name) != expected.get(name):
                    raise RecordingError(f"{path}: header and journal disagree about {shown(name)}: "
                                         f"{shown(header.get(name))} and {shown(expected.get(name))}")

    def sentences(self) -> tuple[str, ...]:
        return ("calls=: this call",) * self.skipped + (NOTHING_RAN,) * self.unseen + tuple(
            f"{why}: {count} tensor{'s' * (count > 1)}, the first of them {first}" for why, (first, count) in
            self.left.items())


def _json(data: bytes, what: str) -> dict:
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{what} is not readable: {shown(str(error))}") from None
    if not isinstance(found, dict):
        raise RecordingError(f"{what} is a JSON {type(found).__name__}, not an object")
    return found


class _RankReader:
    """Reads one rank's journal, line by line."""

    def __init__(self, folder: Path, rank: int):
        self.rank, self.folder, self.path = rank, folder / f"rank{rank}", folder / f"rank{rank}" / _MANIFEST
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise RecordingError(f"{self.folder} is not a folder")
        self.lines, self.about = [], None
        if not any(self.folder.iterdir()):
            return  # it ended before its first line
        size = ordinary(self.path).stat().st_size
        if size > _MAX_MANIFEST:
            raise RecordingError(f"{self.path} has {size:,} bytes, more than the {_MAX_MANIFEST:,} that are read; "
                                 "record fewer calls, with calls= or layers=")
        self.lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut off
        if self.lines:
            self.about = self._about()

    def _about(self):
        about = _json(self.lines[0], f"{self.path}, line 1,")
        if about.get("format") != "tplab-record":
            raise RecordingError(f"{self.path} is not the journal of a recorder: its format is "
                                 f"{shown(about.get('format'))}")
        if whole_number(about.get("version")) != VERSION:
            raise RecordingError(f"{self.path} has format version {shown(about.get('version'))}, this tplab reads "
                                 f"{VERSION}; record again with this tplab's record.py")
        world_size = whole_number(about.get("world_size"), 1, _MAX_WORLD)
        if world_size is None or whole_number(about.get("rank"), 0, world_size - 1) != self.rank:
            raise RecordingError(f"{self.path} says rank {shown(about.get('rank'))} of "
                                 f"{shown(about.get('world_size'))}, in a folder named rank{self.rank}")
        if not isinstance(about.get("run"), str):
            raise RecordingError(f"{self.path} does not say which run it belongs to")
        return about

    def read(self) -> RecordedRank:
        """The rank's calls and parameters; RecordingError names the line that no recorder would have written."""
        self.calls, self.call, self.parameters = [], None, _Draft(self.folder, "parameters")
        handlers = {"call": self._call, "file": self._file, "tensor": self._tensor, "enter": self._enter,
                    "leave": self._leave, "left out": self._left_out, "end": self._end}
        for number, data in enumerate(self.lines[1:], 2):
            where = f"{self.path}, line {number}"
            line = _json(data, where)
            event = line.get("event")
            if not isinstance(event, str) or event not in handlers:
                raise RecordingError(f"{where}: an event {shown(event)} cannot come here")
            try:
                handlers[event](line)
            except _Wrong as wrong:
                raise RecordingError(f"{where}: {wrong}") from None
        if self.call is not None:
            self._finish("cut off")
        self.parameters.check(ended=False)
        return RecordedRank(self.rank, tuple(self.calls), {entry.name: entry for entry in self.parameters.entries},
                            self.parameters.sentences())

    def _call(self, line):
        if self.call is not None or _count(line, "call") != len(self.calls):
            raise _Wrong(f"call {shown(line.get('call'))} cannot begin here; {len(self.calls)} calls have ended")
        self.call = _Draft(self.folder, f"call{len(self.calls)}")
        self.call.said = [_numbers(line, key) for key in ("input_ids", "positions", "sequences")]
        if line.get("skipped"):
            self.call.skipped = True

    def _draft(self, parameter: bool) -> "_Draft":
        if not parameter and self.call is None:
            raise _Wrong("no call has begun")
        return self.parameters if parameter else self.call

    def _about_tensor(self, line):
        if line.get("kind") not in ("in", "out", "tensor", "parameter"):
            raise _Wrong(f"there is no kind {shown(line.get('kind'))}")
        return _text(line, "name"), line["kind"], _text(line, "path"), _count(line, "nth")

    def _file(self, line):
        self._draft(_text(line, "file").startswith("parameters")).begin(line["file"], _count(line, "room"))

    def _tensor(self, line):
        name, kind, path, nth = about = self._about_tensor(line)
        draft = self._draft(kind == "parameter")
        stored, shape = line.get("dtype"), line.get("shape")
        if not isinstance(stored, str) or stored not in _DTYPES:
            raise _Wrong(f"dtype {shown(stored)} is none of {', '.join(_DTYPES)}")
        if not isinstance(shape, list) or len(shape) > 16 or any(whole_number(n, 0, 2**40) is None for n in shape):
            raise _Wrong(f"{shown(shape)} is no shape")
        if about in draft.known:
            raise _Wrong(f"{kind} {path} of run {nth} of {name!r} comes twice")
        draft.known.add(about)
        label = name if kind == "parameter" else " ".join(map(str, about))
        file, offset = draft.place(_count(line, "key"), label, _DTYPES[stored], tuple(shape))
        draft.entries.append(Entry(name, kind, path, nth, len(draft.entries), _text(line, "module_class"),
                                   tuple(shape), _DTYPES[stored], file, offset))

    def _enter(self, line):
        draft = self._draft(False)
        draft.last = _text(line, "name")
        draft.stack.append(draft.last)

    def _leave(self, line):
        draft, name = self._draft(False), _text(line, "name")
        while draft.stack and draft.stack.pop() != name:
            pass
        if line.get("error") is not None:
            draft.raised.append(f"{name}: {_error(line)}")

    def _left_out(self, line):
        name, kind, _, _ = self._about_tensor(line)
        left, why = self._draft(kind == "parameter").left, _text(line, "why")
        first, count = left.get(why, (name, 0))
        left[why] = first, count + 1

    def _end(self, line):
        self._draft(False).unseen = line.get("ran") is False
        self._finish("done" if line.get("error") is None else f"failed: {_error(line)}")

    def _finish(self, status):
        draft, self.call = self.call, None
        draft.check(ended=status != "cut off")
        ids, positions, sequences = draft.said
        sequences = None if sequences is None else sequences.flatten().tolist()
        inside = draft.stack[-1] if draft.stack else ""
        self.calls.append(Call(len(self.calls), ids, positions, sequences, tuple(draft.entries), status, draft.last,
                               inside, tuple(draft.raised), draft.sentences()))


def _text(line, key):
    found = line.get(key)
    if not isinstance(found, str) or len(found) > 1000 or not found.isprintable():
        raise _Wrong(f"{key} is {shown(found)}, not a printable text of at most 1,000 characters")
    return found


def _error(line):
    # Of any engine: what it holds is shown, not trusted.
    return "".join(c if c.isprintable() else " " for c in str(line["error"]))[:300]


def _count(line, key):
    found = whole_number(line.get(key), 0)
    if found is None:
        raise _Wrong(f"{key} is {shown(line.get(key))}, not a whole number from 0 up")
    return found


def _numbers(line, key) -> Tensor | None:
    if line.get(key) is None:
        return None
    try:
        found = torch.tensor(line[key])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is None or found.numel() and found.dtype != torch.int64:
        raise _Wrong(f"{key} is {shown(line[key])}, not whole numbers in rows of one length")
    return found.long()
