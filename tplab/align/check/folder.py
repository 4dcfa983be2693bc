"""A recorded run, read from the folder that ``tplab/record.py`` wrote; a tensor is read when it is asked for.

Nothing in a folder is trusted, and nothing is unpickled: a journal that the recorder would not have written is refused.
"""

import json
import math
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tplab.checks import shown, whole_number
from tplab.errors import TplabError
from tplab.record import DTYPES, VERSION

_DTYPES = {stored: dtype for dtype, stored in DTYPES.items()}
NOTHING_RAN = ("no watched module ran in this call; a replayed graph (CUDA graphs, torch.compile) calls none: record "
               "the engine while it runs eagerly")
_MAX_MANIFEST = 1 << 28  # bytes: some 1,000 decode steps of a model of 30 layers
_MAX_WORLD = 4096


class RecordingError(TplabError):
    """The folder is no recording that can be read; the message says where it is wrong."""


@dataclass(frozen=True)
class Entry:
    """One recorded tensor.

    Attributes:
        name: the module's dotted name in the engine ("" for the model itself), or the name given to ``rec.tensor``.
        kind: "in", "out", "tensor" or "parameter".
        path: which argument or element: "0", "hidden_states", "1.0"; "" for an output that is one tensor.
        nth: the module's how-manieth run within the call, from 0.
        order: running number within the rank's call; a module's inputs stand before what it runs, outputs after.
        module_class: "Linear"; "" for what no module computed.
    """

    name: str
    kind: str
    path: str
    nth: int
    order: int
    module_class: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path = field(repr=False)
    offset: int = field(repr=False)

    def tensor(self) -> Tensor:
        """Read it from its file; RecordingError if the file has changed or shrunk since the folder was read."""
        found = torch.empty(math.prod(self.shape), dtype=self.dtype)
        with open(_ordinary(self.file), "rb") as file:
            file.seek(self.offset)
            if file.readinto(found.view(torch.uint8).numpy()) != found.nbytes:
                raise RecordingError(f"{self.file} ends within {self.name!r}; it was cut off after the folder was read")
        return found.reshape(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of the engine on one rank.

    Attributes:
        input_ids, positions, sequences: what ``rec.inputs`` said, or None.
        status: "done", "cut off" (the process ended or hangs within it), or "failed: ValueError: …".
        last: the module that was entered last; "" before the first.
        raised: modules that ended with an exception, in order: "layers.0.rotary: RuntimeError: …".
        left_out: what was not recorded and why, one sentence each.
    """

    index: int
    input_ids: Tensor | None
    positions: Tensor | None
    sequences: list[int] | None
    entries: tuple[Entry, ...]
    status: str
    last: str
    raised: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class RecordedRank:
    """What one rank recorded; ``parameters`` by name, where ``rec.parameters`` kept them."""

    rank: int
    calls: tuple[Call, ...]
    parameters: dict[str, Entry]
    left_out: tuple[str, ...] = ()  # of the parameters


@dataclass(frozen=True)
class Recorded:
    """A recorded run; ``ranks`` has one element per rank, None where a rank left nothing."""

    folder: Path
    world_size: int
    ranks: tuple[RecordedRank | None, ...]
    notes: tuple[str, ...] = ()


def read_recorded(folder: str | os.PathLike) -> Recorded:
    """Read and check the folder that ``record(folder, …)`` wrote; one that was cut off is read as far as it goes.

    Raises RecordingError, in one sentence that names the file, for everything that the recorder would not have written.
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
    readers = [reader for number in numbers if (reader := _RankReader(folder, number)).lines]
    if not readers:
        raise RecordingError(f"{folder} holds no recording: no rank came to write a line")
    first = readers[0]
    for other in readers[1:]:
        for key, what in ("run", "two runs are mixed"), ("world_size", "the ranks disagree about world_size"):
            if other.about[key] != first.about[key]:
                raise RecordingError(f"{folder}: {what}: rank{first.rank} says {shown(first.about[key])}, "
                                     f"rank{other.rank} {shown(other.about[key])}; record again into a new folder")
    ranks = {reader.rank: reader.read() for reader in readers}
    return Recorded(folder, first.about["world_size"], tuple(map(ranks.get, range(first.about["world_size"]))))


def _ordinary(path: Path) -> Path:
    """``path``, if it is a plain file: a link could lead out of the folder, a pipe would keep a reader waiting."""
    try:
        if stat.S_ISREG(path.lstat().st_mode):
            return path
    except FileNotFoundError:
        raise RecordingError(f"{path} is missing, though the journal beside it counts on it") from None
    raise RecordingError(f"{path} is not an ordinary file")


class _Wrong(Exception):
    """What a line says cannot be; the sentence lacks the line."""


class _Line(dict):
    """A journal's line, each of whose values is checked when it is asked for."""

    def __init__(self, data: bytes, where: str):
        try:
            found = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise RecordingError(f"{where} is not readable: {shown(str(error))}") from None
        if not isinstance(found, dict):
            raise RecordingError(f"{where} is a JSON {type(found).__name__}, not an object")
        super().__init__(found)

    def text(self, key: str) -> str:
        found = self.get(key)
        if not isinstance(found, str) or len(found) > 1000 or not found.isprintable():
            raise _Wrong(f"{key} is {shown(found)}, not a printable text of at most 1,000 characters")
        return found

    def count(self, key: str) -> int:
        if (found := whole_number(self.get(key), 0)) is None:
            raise _Wrong(f"{key} is {shown(self.get(key))}, not a whole number from 0 up")
        return found

    def numbers(self, key: str) -> Tensor | None:
        if self.get(key) is None:
            return None
        try:
            found = torch.tensor(self[key])
        except (TypeError, ValueError, RuntimeError, OverflowError):
            found = None
        if found is None or found.numel() and found.dtype != torch.int64:
            raise _Wrong(f"{key} is {shown(self[key])}, not whole numbers in rows of one length")
        return found.long()

    def error(self) -> str:
        """Of any engine: what it holds is shown, not trusted."""
        return "".join(c if c.isprintable() else " " for c in str(self["error"]))[:300]

    def about(self) -> tuple[str, str, str, int]:
        """Name, kind, path and nth of a tensor."""
        if self.get("kind") not in ("in", "out", "tensor", "parameter"):
            raise _Wrong(f"there is no kind {shown(self.get('kind'))}")
        return self.text("name"), self["kind"], self.text("path"), self.count("nth")


class _Draft:
    """A call as its lines come, or the parameters; and the files in which its tensors follow each other."""

    def __init__(self, folder: Path, stem: str):
        self.folder, self.stem = folder, stem
        self.files: list[tuple[Path, int, list]] = []  # path, where its tensors begin, dtype and bounds of each
        self.entries, self.known, self.last, self.raised = [], set(), "", []
        self.said, self.notes, self.left = (None, None, None), [], {}

    def begin(self, line: _Line) -> None:
        expected = f"{self.stem}{f'.{len(self.files)}' if self.files else ''}.safetensors"
        if line.text("file") != expected:
            raise _Wrong(f"the next file is {expected}, not {shown(line['file'])}")
        self.files.append((self.folder / expected, 8 + line.count("room"), []))

    def add(self, line: _Line) -> None:
        """A tensor: the next one of the current file, or one that came before under another name."""
        about, stored, shape, key = line.about(), line.get("dtype"), line.get("shape"), line.count("key")
        if not isinstance(stored, str) or stored not in _DTYPES:
            raise _Wrong(f"dtype {shown(stored)} is none of {', '.join(_DTYPES)}")
        if not isinstance(shape, list) or len(shape) > 16 or any(whole_number(n, 0, 2**40) is None for n in shape):
            raise _Wrong(f"{shown(shape)} is no shape")
        if about in self.known:
            raise _Wrong(f"{about[1]} {about[2]} of run {about[3]} of {about[0]!r} comes twice")
        if not self.files:
            raise _Wrong("a tensor comes before its file")
        self.known.add(about)
        path, start, tensors = self.files[-1]
        size, at = math.prod(shape) * _DTYPES[stored].itemsize, tensors[-1][2] if tensors else 0
        if key == len(tensors):
            tensors.append((stored, at, at + size))
        elif key > len(tensors):
            raise _Wrong(f"there are {len(tensors)} tensors in {path.name} yet, so none has the number {key}")
        known, at, end = tensors[key]
        if (known, end - at) != (stored, size):
            raise _Wrong(f"tensor {key} of {path.name} has another dtype or size")
        self.entries.append(Entry(*about, len(self.entries), line.text("module_class"), tuple(shape), _DTYPES[stored],
                                  path, start + at))

    def check(self, ended: bool) -> None:
        """Hold the files against the journal; unless the call has ``ended``, the last file may be ahead of it."""
        for path, start, tensors in self.files:
            whole = ended or path is not self.files[-1][0]
            size, content = _ordinary(path).stat().st_size, tensors[-1][2] if tensors else 0
            needed = start + content if whole or content else 0
            if size < needed or whole and size > needed:
                raise RecordingError(f"{path} has {size:,} bytes; its journal says {needed:,}")

    def left_out(self) -> tuple[str, ...]:
        return (*self.notes, *(f"{why}: {count} tensor{'s' * (count > 1)}, the first of them {first}"
                               for why, (first, count) in self.left.items()))


class _RankReader:
    """Reads one rank's journal, line by line."""

    def __init__(self, folder: Path, rank: int):
        self.rank, self.folder, self.path = rank, folder / f"rank{rank}", folder / f"rank{rank}" / "manifest.jsonl"
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise RecordingError(f"{self.folder} is not a folder")
        self.lines = []
        if not any(self.folder.iterdir()):
            return  # it ended before its first line
        size = _ordinary(self.path).stat().st_size
        if size > _MAX_MANIFEST:
            raise RecordingError(f"{self.path} has {size:,} bytes, more than the {_MAX_MANIFEST:,} that are read; "
                                 "record fewer calls, with calls= or layers=")
        self.lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut off
        if self.lines:
            self.about = about = _Line(self.lines[0], f"{self.path}, line 1,")
            world_size = whole_number(about.get("world_size"), 1, _MAX_WORLD)
            for wrong, what in (
                    (about.get("format") != "tplab-record",
                     f"is not the journal of a recorder: its format is {shown(about.get('format'))}"),
                    (whole_number(about.get("version")) != VERSION,
                     f"has format version {shown(about.get('version'))}, this tplab reads {VERSION}; record again with "
                     "this tplab's record.py"),
                    (world_size is None or whole_number(about.get("rank"), 0, world_size - 1) != rank,
                     f"says rank {shown(about.get('rank'))} of {shown(about.get('world_size'))}, in a folder named "
                     f"rank{rank}"),
                    (not isinstance(about.get("run"), str), "does not say which run it belongs to")):
                if wrong:
                    raise RecordingError(f"{self.path} {what}")

    def read(self) -> RecordedRank:
        """The rank's calls and parameters; RecordingError names the line that no recorder would have written."""
        self.calls, self.call, self.parameters = [], None, _Draft(self.folder, "parameters")
        for number, data in enumerate(self.lines[1:], 2):
            where = f"{self.path}, line {number}"
            try:
                self._take(_Line(data, where))
            except _Wrong as wrong:
                raise RecordingError(f"{where}: {wrong}") from None
        if self.call is not None:
            self._finish("cut off")
        self.parameters.check(ended=False)
        return RecordedRank(self.rank, tuple(self.calls), {entry.name: entry for entry in self.parameters.entries},
                            self.parameters.left_out())

    def _take(self, line: _Line) -> None:
        event = line.get("event")
        if event not in ("call", "file", "tensor", "enter", "leave", "left out", "end"):
            raise _Wrong(f"an event {shown(event)} cannot come here")
        if event == "call":
            if self.call is not None or line.count("call") != len(self.calls):
                raise _Wrong(f"call {shown(line.get('call'))} cannot begin here; {len(self.calls)} calls have ended")
            self.call = _Draft(self.folder, f"call{len(self.calls)}")
            self.call.said = [line.numbers(key) for key in ("input_ids", "positions", "sequences")]
            self.call.notes += ["calls=: this call"] * bool(line.get("skipped"))
            return
        parameter = (line.text("file").startswith("parameters") if event == "file" else
                     event in ("tensor", "left out") and line.get("kind") == "parameter")
        draft = self.parameters if parameter else self.call
        if draft is None:
            raise _Wrong("no call has begun")
        match event:
            case "file":
                draft.begin(line)
            case "tensor":
                draft.add(line)
            case "enter":
                draft.last = line.text("name")
            case "leave" if line.get("error") is not None:
                draft.raised.append(f"{line.text('name')}: {line.error()}")
            case "left out":
                why, (name, *_) = line.text("why"), line.about()
                first, count = draft.left.get(why, (name, 0))
                draft.left[why] = first, count + 1
            case "end":
                draft.notes += [NOTHING_RAN] * (line.get("ran") is False)
                self._finish("done" if line.get("error") is None else f"failed: {line.error()}")

    def _finish(self, status: str) -> None:
        draft, self.call = self.call, None
        draft.check(ended=status != "cut off")
        ids, positions, sequences = draft.said
        self.calls.append(Call(len(self.calls), ids, positions, None if sequences is None else
                               sequences.flatten().tolist(), tuple(draft.entries), status, draft.last,
                               tuple(draft.raised), draft.left_out()))
