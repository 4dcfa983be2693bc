"""What a recorded run consists of: ranks, their calls, and the tensors of each call."""

import math
import stat
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tplab.errors import TplabError


class RecordingError(TplabError):
    """The folder is no recording that can be read; the message says where it is wrong."""


def ordinary(path: Path) -> Path:
    """``path``, if it is a plain file: a link could lead out of the folder, a pipe would keep a reader waiting."""
    try:
        if stat.S_ISREG(path.lstat().st_mode):
            return path
    except FileNotFoundError:
        raise RecordingError(f"{path} is missing, though the journal beside it counts on it") from None
    raise RecordingError(f"{path} is not an ordinary file")


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
        with open(ordinary(self.file), "rb") as file:
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
        inside: the innermost module that was entered and not left; "" if none.
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
    inside: str
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
