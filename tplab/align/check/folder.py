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

from tplab.checks import counted, quoted, whole_number
from tplab.errors import TplabError
from tplab.record import DTYPES, VERSION

_DTYPES = {stored: dtype for dtype, stored in DTYPES.items()}
NOTHING_RAN = ("no watched module ran in this call; a replayed graph (CUDA graphs, torch.compile) calls none: record "
               "the engine while it runs eagerly")
_MAX_MANIFEST = 1 << 28  # bytes: some 1,000 decode steps of a model of 30 layers
_MAX_WORLD = 4096
_OUT_OF_TURN = "a recorder writes no such line here; record again"


class RecordingError(TplabError):
    """The folder is no recording that can be read; the message says where it is wrong."""


@dataclass(frozen=True)
class Entry:
    """One recorded tensor."""

    name: str  # the module's dotted name in the engine ("" for the model itself), or the name given to rec.tensor
    kind: str  # "in", "out", "tensor" or "parameter"
    path: str  # which argument or element: "0", "hidden_states", "1.0"; "" for an output that is one tensor
    nth: int  # the number of the module's run within the call, from 0
    order: int  # number within the call: a module's inputs come before its inner modules, its outputs after them
    module_class: str  # "Linear"; "" for rec.tensor
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
    """One call of the engine on one rank; ids, positions and sequences are what ``rec.inputs`` said, or None."""

    index: int
    input_ids: Tensor | None
    positions: Tensor | None
    sequences: list[int] | None
    entries: tuple[Entry, ...]
    status: str  # "done", "cut off" (the process ended or hung within the call), or "failed: ValueError: …"
    last: str  # the module that was entered last; "" before the first
    raised: tuple[str, ...]  # modules that ended with an exception, in order: "layers.0.rotary: RuntimeError: …"
    left_out: tuple[str, ...]  # one sentence for each reason why something was not recorded


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
    """Read and check the folder that ``record(folder, …)`` wrote; a run that was cut off is read as far as it goes.

    Raises RecordingError, one sentence with the file's name, for anything that the recorder would not have written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordingError(f"{folder} is not a folder; give the one that record(...) wrote")
    try:
        return _read(folder)
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {quoted(str(error))}") from error


def _read(folder: Path) -> Recorded:
    numbers = sorted(int(hit.group(1)) for path in folder.iterdir()
                     if (hit := re.fullmatch(r"rank(0|[1-9]\d{0,5})", path.name)))
    if not numbers:
        raise RecordingError(f"{folder} holds no recording: there is no rank0, rank1, … in it")
    readers = [reader for number in numbers if (reader := _RankReader(folder, number)).about]
    if not readers:
        raise RecordingError(f"{folder} holds no recording: no rank wrote a line")
    first = readers[0]
    for other in readers[1:]:
        for key, what in ("run", "two runs are mixed"), ("world_size", "the ranks disagree about world_size"):
            if other.about[key] != first.about[key]:
                raise RecordingError(f"{folder}: {what}: rank{first.rank} says {quoted(first.about[key])}, "
                                     f"rank{other.rank} {quoted(other.about[key])}; record again into a new folder")
    ranks = {reader.rank: reader.recorded() for reader in readers}
    world_size = first.about["world_size"]
    return Recorded(folder, world_size, tuple(map(ranks.get, range(world_size))))


def _ordinary(path: Path) -> Path:
    """``path``, if it is a plain file: a link could lead out of the folder, and reading a pipe could wait for ever."""
    try:
        if stat.S_ISREG(path.lstat().st_mode):
            return path
    except FileNotFoundError:
        raise RecordingError(f"{path} is missing, but the journal beside it names it") from None
    raise RecordingError(f"{path} is not an ordinary file")


class _Wrong(Exception):
    """What is wrong with a line, without the line's number."""


def _numbers(value) -> Tensor | None:
    try:
        found = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return found.long() if not found.numel() or found.dtype == torch.int64 else None


def _one_of(*known):
    return ", ".join(map(str, known)), lambda value: value if type(value) in (str, int) and value in known else None


_FIELDS = {  # field of a line → what a recorder writes there, and a function that checks it
    **dict.fromkeys(("name", "path", "why", "file", "module_class", "run"), (
        "a printable text of at most 1,000 characters",
        lambda value: value if isinstance(value, str) and len(value) <= 1000 and value.isprintable() else None)),
    **dict.fromkeys(("call", "room", "nth", "key", "rank"), (
        "a whole number from 0 up", lambda value: whole_number(value, 0))),
    **dict.fromkeys(("input_ids", "positions", "sequences"), ("whole numbers in rows of one length", _numbers)),
    "world_size": (f"a number of ranks up to {_MAX_WORLD}", lambda value: whole_number(value, 1, _MAX_WORLD)),
    "shape": ("a shape", lambda value: tuple(value) if isinstance(value, list) and len(value) <= 16 and all(
        whole_number(n, 0, 2**40) is not None for n in value) else None),
    "format": _one_of("tplab-record"), "dtype": _one_of(*_DTYPES), "kind": _one_of("in", "out", "tensor", "parameter"),
    "version": (f"{VERSION}; record again with this tplab's record.py", _one_of(VERSION)[1]),
    "event": _one_of("call", "file", "tensor", "enter", "leave", "left out", "end")}


class _Line(dict):
    """A journal's line; ``line[key]`` is checked, and raises what is wrong with it."""

    def __init__(self, data: bytes):
        try:
            super().__init__(json.loads(data.decode()))
        except (ValueError, TypeError, RecursionError) as error:
            raise _Wrong(f"no JSON object: {quoted(str(error))}") from None

    def __getitem__(self, key: str):
        what, take = _FIELDS[key]
        if (found := take(self.get(key))) is None:
            raise _Wrong(f"{key} is {quoted(self.get(key))}, not {what}")
        return found

    @property
    def error(self) -> str:
        """What an engine raised; ``""`` if nothing. It is shown, not trusted."""
        found = self.get("error")
        return "" if found is None else "".join(c if c.isprintable() else " " for c in str(found))[:300] or "an error"


class _Draft:
    """A call while its lines are read, or the parameters; and the files that hold its tensors one after the other."""

    def __init__(self, folder: Path, stem: str):
        self.folder, self.stem = folder, stem
        self.files: list[tuple[Path, int, list[int]]] = []  # path, where its tensors begin, from there each one's end
        self.entries, self.last, self.raised = [], "", []
        self.said, self.notes, self.left = (None, None, None), [], {}

    def begin(self, line: _Line) -> None:
        """The next file. Its name is computed: a name from the journal could lead out of the folder."""
        part = f".{len(self.files)}" if self.files else ""
        self.files.append((self.folder / f"{self.stem}{part}.safetensors", 8 + line["room"], [0]))

    def add(self, line: _Line) -> None:
        """A tensor: the next one of the current file, or an earlier one under another name."""
        dtype, shape, key = _DTYPES[line["dtype"]], line["shape"], line["key"]
        file, start, ends = self.files[-1] if self.files else (None, 0, [])
        if key == len(ends) - 1:
            ends.append(ends[-1] + math.prod(shape) * dtype.itemsize)
        if key > len(ends) - 2 or ends[key + 1] - ends[key] != math.prod(shape) * dtype.itemsize:
            raise _Wrong(_OUT_OF_TURN)
        self.entries.append(Entry(line["name"], line["kind"], line["path"], line["nth"], len(self.entries),
                                  line["module_class"], shape, dtype, file, start + ends[key]))

    def check(self) -> None:
        """Compare the files' sizes with the journal; a file may hold more, if its process ended between the two."""
        for path, start, ends in self.files:
            size, needed = _ordinary(path).stat().st_size, start + ends[-1] if ends[-1] else 0
            if size < needed:
                raise RecordingError(f"{path} has {size:,} bytes; its journal says {needed:,}")

    def left_out(self) -> tuple[str, ...]:
        return (*self.notes, *(f"{why}: {counted(count, 'tensor')}, the first of them {first}"
                               for why, (first, count) in self.left.items()))


class _RankReader:
    """Reads one rank's journal, line by line; RecordingError names the line that no recorder would have written."""

    def __init__(self, folder: Path, rank: int):
        self.rank, self.folder, self.about = rank, folder / f"rank{rank}", {}
        self.calls, self.call, self.parameters = [], None, _Draft(self.folder, "parameters")
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise RecordingError(f"{self.folder} is not a folder")
        if any(self.folder.iterdir()):  # else it ended before its first line
            self._read(_ordinary(self.folder / "manifest.jsonl"))

    def _read(self, journal: Path) -> None:
        if (size := journal.stat().st_size) > _MAX_MANIFEST:
            raise RecordingError(f"{journal} has {size:,} bytes, more than the {_MAX_MANIFEST:,} that are read; "
                                 "record fewer calls, with calls= or layers=")
        lines = journal.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut off
        for number, data in enumerate(lines, 1):
            try:
                (self._take if self.about else self._begin)(_Line(data))
            except _Wrong as wrong:
                raise RecordingError(f"{journal}, line {number}: {wrong}") from None
        if self.call is not None:
            self._finish("cut off")
        self.parameters.check()

    def recorded(self) -> RecordedRank:
        return RecordedRank(self.rank, tuple(self.calls), {entry.name: entry for entry in self.parameters.entries},
                            self.parameters.left_out())

    def _begin(self, line: _Line) -> None:
        self.about = {key: line[key] for key in ("format", "version", "rank", "world_size", "run")}
        if not self.rank == line["rank"] < line["world_size"]:
            raise _Wrong(f"rank {line['rank']} of {line['world_size']}, in a folder named rank{self.rank}")

    def _take(self, line: _Line) -> None:
        event = line["event"]
        parameter = line["file"].startswith("parameters") if event == "file" else (
            event in ("tensor", "left out") and line["kind"] == "parameter")
        draft = self.parameters if parameter else self.call
        if (draft is None) != (event == "call"):
            raise _Wrong(_OUT_OF_TURN)
        match event:
            case "call":
                if line["call"] != len(self.calls):
                    raise _Wrong(_OUT_OF_TURN)
                self.call = _Draft(self.folder, f"call{len(self.calls)}")
                self.call.said = [None if line.get(key) is None else line[key]
                                  for key in ("input_ids", "positions", "sequences")]
                self.call.notes += ["calls=: this call"] * bool(line.get("skipped"))
            case "file":
                draft.begin(line)
            case "tensor":
                draft.add(line)
            case "enter":
                draft.last = line["name"]
            case "leave" if line.error:
                draft.raised.append(f"{line['name']}: {line.error}")
            case "left out":
                first, count = draft.left.get(line["why"], (line["name"], 0))
                draft.left[line["why"]] = first, count + 1
            case "end":
                draft.notes += [NOTHING_RAN] * (line.get("ran") is False)
                self._finish(f"failed: {line.error}" if line.error else "done")

    def _finish(self, status: str) -> None:
        draft, self.call = self.call, None
        draft.check()
        ids, positions, sequences = draft.said
        self.calls.append(Call(len(self.calls), ids, positions, None if sequences is None else
                               sequences.flatten().tolist(), tuple(draft.entries), status, draft.last,
                               tuple(draft.raised), draft.left_out()))
