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

NOTHING_RAN = ("no watched module ran in this call; a replayed graph (CUDA graphs, torch.compile) calls none: record "
               "the engine while it runs eagerly")
_MAX_MANIFEST = 1 << 28  # bytes: some 1,000 decode steps of a model of 30 layers
_MAX_WORLD = 4096


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
        tensor = torch.empty(math.prod(self.shape), dtype=self.dtype)
        with open(_ordinary(self.file), "rb") as file:
            file.seek(self.offset)
            if file.readinto(tensor.view(torch.uint8).numpy()) != tensor.nbytes:
                raise RecordingError(f"{self.file} ends within {self.name!r}; it was cut off after the folder was read")
        return tensor.reshape(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of the engine on one rank; ids, positions, sequences and texts are what ``rec.inputs`` said, or None."""

    index: int
    input_ids: Tensor | None
    positions: Tensor | None
    sequences: list[int] | None
    texts: dict[int, list[int]] | None
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


@dataclass(frozen=True)
class Recorded:
    """A recorded run; ``ranks`` has one element per rank, None where a rank left nothing."""

    folder: Path
    world_size: int
    ranks: tuple[RecordedRank | None, ...]


def read_recorded(folder: str | os.PathLike) -> Recorded:
    """Read and check the folder that ``record(folder, …)`` wrote; a run that was cut off is read as far as it goes.

    Raises RecordingError, one sentence with the file's name, for anything that the recorder would not have written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordingError(f"{folder} is not a folder; give the one that record(...) wrote")
    try:
        numbers = sorted(int(hit[1]) for path in folder.iterdir() if (hit := re.fullmatch(r"rank(0|[1-9]\d{0,5})",
                                                                                          path.name)))
        readers = [reader for number in numbers if (reader := _RankReader(folder, number)).about]
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {quoted(str(error))}") from error
    if not readers:
        raise RecordingError(f"{folder} holds no recording: no rank wrote a line in a folder rank0, rank1, …")
    first = readers[0]
    for other in readers[1:]:
        for key, what in ("run", "two runs are mixed"), ("world_size", "the ranks disagree about world_size"):
            if other.about[key] != first.about[key]:
                raise RecordingError(f"{folder}: {what}: rank{first.rank} says {quoted(first.about[key])}, "
                                     f"rank{other.rank} {quoted(other.about[key])}; record again into a new folder")
    ranks = {reader.rank: reader.recorded() for reader in readers}
    return Recorded(folder, first.about["world_size"], tuple(map(ranks.get, range(first.about["world_size"]))))


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


def _number(value, most: int = 1 << 62) -> int:
    if whole_number(value, 0, most) is None:
        raise _Wrong(f"{quoted(value)} is not a whole number from 0 to {most}")
    return value


def _text(value) -> str:
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise _Wrong(f"{quoted(value)} is not a printable text of at most 1,000 characters")
    return value


def _ids(value) -> Tensor:
    try:
        ids = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        ids = torch.empty(1)
    if ids.numel() and ids.dtype != torch.int64:
        raise _Wrong(f"{quoted(value)} is not whole numbers in rows of one length")
    return ids.long()


def _among(value, known):
    if not isinstance(value, str) or value not in known:
        raise _Wrong(f"{quoted(value)} is not one of {', '.join(known)}")
    return known[value]


_DTYPES = {stored: dtype for dtype, stored in DTYPES.items()}
_KINDS = {kind: kind for kind in ("in", "out", "tensor", "parameter")}


class _Draft:
    """A call while its lines are read, or the parameters; and the files that hold its tensors one after the other."""

    def __init__(self, folder: Path, stem: str, line: dict):
        self.folder, self.stem = folder, stem
        self.files: list[tuple[Path, int, list[int]]] = []  # path, where its tensors begin, from there each one's end
        self.entries, self.last, self.raised, self.left = [], "", [], {}
        self.notes = ["calls=: this call"] * bool(line.get("skipped"))
        self.ids, self.positions, self.sequences = (None if line.get(key) is None else _ids(line[key])
                                                    for key in ("input_ids", "positions", "sequences"))
        self.texts = None if line.get("texts") is None else {
            int(key): _ids(ids).flatten().tolist() for key, ids in line["texts"].items()}

    def take(self, event: str, line: dict) -> None:
        """A line about this call."""
        if event == "file":  # its name is computed: one from the journal could lead out of the folder
            part = f".{len(self.files)}" if self.files else ""
            self.files.append((self.folder / f"{self.stem}{part}.safetensors", 8 + _number(line["room"]), [0]))
        elif event == "tensor":  # the next one of the current file, or an earlier one under another name
            dtype, shape = _among(line["dtype"], _DTYPES), tuple(_number(n, 2**40) for n in line["shape"])
            key = line["key"]
            (file, start, ends), size = self.files[-1], math.prod(shape) * dtype.itemsize
            if _number(key) == len(ends) - 1:
                ends.append(ends[-1] + size)
            if ends[key + 1] - ends[key] != size:
                raise _Wrong("an earlier tensor has another size")
            self.entries.append(Entry(_text(line["name"]), _among(line["kind"], _KINDS), _text(line["path"]), _number(
                line["nth"]), len(self.entries), _text(line["module_class"]), shape, dtype, file, start + ends[key]))
        elif event == "enter":
            self.last = _text(line["name"])
        elif event == "leave" and line.get("error") is not None:
            self.raised.append(f"{_text(line['name'])}: {_shown(line['error'])}")
        elif event == "left out":
            first, count = self.left.get(_text(line["why"]), (_text(line["name"]), 0))
            self.left[line["why"]] = first, count + 1
        elif event != "leave":
            raise _Wrong("there is no such event")

    def check(self) -> None:
        """Compare the files' sizes with the journal; a file may hold more, if its process ended between the two."""
        for path, start, ends in self.files:
            size, needed = _ordinary(path).stat().st_size, start + ends[-1] if ends[-1] else 0
            if size < needed:
                raise RecordingError(f"{path} has {size:,} bytes; its journal says {needed:,}")

    def call(self, index: int, status: str) -> Call:
        self.check()
        left = (f"{why}: {counted(count, 'tensor')}, the first of them {first}"
                for why, (first, count) in self.left.items())
        sequences = None if self.sequences is None else self.sequences.flatten().tolist()
        return Call(index, self.ids, self.positions, sequences, self.texts, tuple(self.entries), status,
                    self.last, tuple(self.raised), (*self.notes, *left))


def _shown(error) -> str:
    """What an engine raised; it is shown, not trusted."""
    return "".join(c if c.isprintable() else " " for c in str(error))[:300] or "an error"


class _RankReader:
    """Reads one rank's journal, line by line; RecordingError names the line that no recorder would have written."""

    def __init__(self, folder: Path, rank: int):
        self.rank, self.folder, self.about = rank, folder / f"rank{rank}", {}
        self.calls, self.draft, self.parameters = [], None, _Draft(self.folder, "parameters", {})
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise RecordingError(f"{self.folder} is not a folder")
        if not any(self.folder.iterdir()):
            return  # it ended before its first line
        journal = _ordinary(self.folder / "manifest.jsonl")
        if (size := journal.stat().st_size) > _MAX_MANIFEST:
            raise RecordingError(f"{journal} has {size:,} bytes, more than the {_MAX_MANIFEST:,} that are read; "
                                 "record fewer calls, with calls= or layers=")
        for number, data in enumerate(journal.read_bytes().split(b"\n")[:-1], 1):  # behind the last, it was cut off
            try:
                (self._take if self.about else self._begin)(json.loads(data.decode()))
            except (_Wrong, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
                why = str(error) if isinstance(error, _Wrong) else quoted(f"{type(error).__name__}: {error}")
                raise RecordingError(f"{journal}, line {number}: a recorder writes no such line ({why}); record again"
                                     ) from None
        if self.draft is not None:
            self._finish("cut off")
        self.parameters.check()

    def recorded(self) -> RecordedRank:
        return RecordedRank(self.rank, tuple(self.calls), {entry.name: entry for entry in self.parameters.entries})

    def _begin(self, line: dict) -> None:
        if (written := (line["format"], line["version"])) != ("tplab-record", VERSION):
            raise _Wrong(f"it is {quoted(written)}, not tplab-record {VERSION}")
        if not self.rank == _number(line["rank"]) < _number(line["world_size"], _MAX_WORLD):
            raise _Wrong(f"rank {line['rank']} of {line['world_size']}, in a folder named rank{self.rank}")
        self.about = {"run": _text(line["run"]), "world_size": line["world_size"]}

    def _take(self, line: dict) -> None:
        event = line["event"]
        parameter = _text(line["file"]).startswith("parameters") if event == "file" else line.get("kind") == "parameter"
        if event == "call":
            if self.draft is not None or line["call"] != len(self.calls):
                raise _Wrong("a call out of turn")
            self.draft = _Draft(self.folder, f"call{len(self.calls)}", line)
        elif event == "end":
            self.draft.notes += [NOTHING_RAN] * (line.get("ran") is False)
            self._finish(f"failed: {_shown(line['error'])}" if line.get("error") is not None else "done")
        else:
            (self.parameters if parameter else self.draft).take(event, line)

    def _finish(self, status: str) -> None:
        self.calls.append(self.draft.call(len(self.calls), status))
        self.draft = None
