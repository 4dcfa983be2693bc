"""Recordings that something happened to: files cut, lines dropped, ranks missing, tensors renamed, reshaped, cast."""

import random
import shutil
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from tplab.align.check.folder import Entry


@dataclass(frozen=True)
class Changed(Entry):
    """An entry whose tensor comes out changed."""

    made: torch.Tensor | None = None

    def tensor(self):
        return self.made


def on_disk(folder, draw: random.Random) -> str:
    """Damage a folder: cut a file, drop or repeat lines of a journal, remove a rank."""
    kind = draw.choice(["cut", "drop", "twice", "rank", "end"])
    ranks = sorted(path for path in folder.iterdir() if path.is_dir())
    rank = draw.choice(ranks)
    journal = rank / "manifest.jsonl"
    if kind == "rank":
        shutil.rmtree(rank)
    elif kind == "cut":
        file = draw.choice(sorted(rank.iterdir()))
        file.write_bytes(file.read_bytes()[:draw.randrange(file.stat().st_size)])
    else:
        lines = journal.read_text().splitlines(keepends=True)
        at = draw.randrange(1, len(lines))
        journal.write_text("".join({"drop": lines[:at] + lines[at + 1:], "end": lines[:at],
                                    "twice": lines[:at + 1] + lines[at:]}[kind]))
    return kind


def _cast(dtype):
    return lambda x: x.to(dtype)


def in_memory(recorded, draw: random.Random):
    """The same run with something done to all tensors of one name, on one rank or on all, in one call or in all."""
    names = sorted({entry.name for rank in recorded.ranks if rank for call in rank.calls for entry in call.entries})
    name, kind = draw.choice(names), draw.choice(["gone", "renamed", "flat", "turned", "cast", "padded", "fewer", "nan",
                                                  "other", "scalar"])
    some_rank, some_call = (draw.choice([None, 0, 1]) for _ in range(2))
    other = draw.choice(names)
    ways = {"flat": lambda x: x.reshape(-1), "turned": lambda x: x.transpose(0, -1).contiguous(),
            "cast": _cast(draw.choice([torch.float16, torch.bfloat16, torch.int64, torch.float64, torch.bool])),
            "padded": lambda x: F.pad(x, (0, 3)), "fewer": lambda x: x[:-1], "nan": lambda x: x * float("nan"),
            "scalar": lambda x: x.sum()}

    def changed(entry, rank, call):
        if entry.name != name or some_rank not in (None, rank) or some_call not in (None, call):
            return [entry]
        if kind == "gone":
            return []
        if kind in ("renamed", "other"):
            return [replace(entry, name="some.thing.else" if kind == "renamed" else other)]
        try:
            made = ways[kind](entry.tensor())
        except (RuntimeError, IndexError):
            return [entry]
        return [Changed(**(vars(entry) | {"shape": tuple(made.shape), "dtype": made.dtype}), made=made)]

    def entries(rank, call):
        return tuple(new for entry in call.entries for new in changed(entry, rank.rank, call.index))
    ranks = tuple(rank and replace(rank, calls=tuple(replace(call, entries=entries(rank, call)) for call in rank.calls))
                  for rank in recorded.ranks)
    return f"{kind} {name}", replace(recorded, ranks=ranks)

