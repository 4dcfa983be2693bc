"""The arithmetic of the collectives, the same for all kinds of ranks.

Every rank contributes a flat piece, gets the pieces of all ranks, and adds or concatenates them in rank order. So all
ranks have the same bits, and the result does not depend on timing. Subclasses exchange the pieces: by shared memory
between the processes of a pool, by reference between threads, by gloo under torchrun.
"""

import math
import threading
import zlib
from contextlib import nullcontext

import torch

from tplab.ranks.errors import Frame, RankError
from tplab.ranks.oplog import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    DTYPE_CODES,
    MAX_DIMS,
    OPS,
    REDUCE_SCATTER,
    OpLog,
)


class Work:
    """A sum that was started: what ``all_reduce(t, async_op=True)`` returns.

    It is computed as late as possible: in `wait`, or when the rank enters a collective that was called after it. So
    code that reads the tensor too early finds no sum in it every time, and code that writes to it too early changes the
    sum every time.
    """

    def __init__(self, group: "Group", t: torch.Tensor, site: tuple):
        self._group, self.tensor, self._site, self._done = group, t, site, False

    def wait(self) -> bool:
        """Return when the sum is in the tensor."""
        if self in self._group.started:
            self._group.complete(self)
            self._group.started.remove(self)
        return True

    def is_completed(self) -> bool:
        """Whether the sum is in the tensor."""
        return self._done

    def make(self) -> None:
        """Put the sum into the tensor, unless it is there."""
        if not self._done:
            self._done = True
            self._group.all_reduce(self.tensor, self._site)

    @property
    def frame(self) -> Frame:
        """The line that started it."""
        return Frame(self._site[0].split(b"\0")[0].decode(errors="replace"), self._site[1], "")

    def __str__(self):
        return f"all_reduce {list(self.tensor.shape)}"


class Group:
    """A group of one rank; subclasses with more ranks implement `swap`."""

    def __init__(self, rank: int, size: int, log: OpLog | None = None):
        self.rank = rank
        self.size = size
        self.log = log or OpLog()
        self.state = {}
        self.started: list[Work] = []  # and not yet waited for, in the order of the calls
        self.namespace = None  # of %%ranks cells
        self.thread = None  # ident of the only thread that may call collectives; None: any thread

    def swap(self, piece: torch.Tensor, counts=None) -> list[torch.Tensor]:
        """Give `piece` (flat) to all ranks; returns every rank's, in rank order, valid until the next swap but one.

        `counts`: number of elements of each rank, if they differ. Before it returns, it checks that all ranks are in
        the same collective.
        """
        return [piece]

    def sum_up(self, piece: torch.Tensor) -> None:
        """Replace `piece` (contiguous) by the sum of all ranks' pieces, added in rank order; one `swap`."""
        add_in_order(self.swap(_flat(piece)), piece)

    def chunk(self, dtype: torch.dtype) -> int:
        """The most elements of one `swap`."""
        return 1 << 62

    def all_reduce(self, t, frame):
        self._enter(ALL_REDUCE, t, 0, frame)
        if self.size > 1:
            if t.is_contiguous() and t.numel() <= self.chunk(t.dtype):
                self.sum_up(t)
            else:
                flat = _flat(t)
                for piece in self._pieces(flat):
                    self.sum_up(piece)
                with _writing(t):
                    _write_back(flat, t)
        self.log.leave()
        return t

    def start_all_reduce(self, t, frame):
        self._check_tensor(t, "all_reduce")
        self._check_thread("all_reduce")
        self.started.append(work := Work(self, t, self.log.call_site(frame)))
        return work

    def complete(self, last: Work | None = None) -> None:
        """Make the sums that were started, in their order: all of them, or up to ``last``."""
        started, self.started = self.started, []  # entering these collectives completes no others
        for work in started:
            work.make()
            if work is last:
                break
        self.started = started

    def end(self) -> None:
        """The function has returned. Raises `RankError` if it has started a sum and never waited for it."""
        if self.started:
            error = RankError("returned without wait() for " + ", ".join(map(str, self.started)))
            error.frames = [work.frame for work in self.started[:1]]
            raise error

    def reduce_scatter(self, t, dim, sizes, frame):
        dim = self._dim(t, dim, "reduce_scatter")
        length = t.shape[dim]
        sizes = [length // self.size] * self.size if sizes is None else [int(n) for n in sizes]
        if len(sizes) != self.size or sum(sizes) != length or min(sizes) < 0:
            raise RankError(f"reduce_scatter: sizes {sizes} do not add up to the {length} along dim {dim} (shape "
                            f"{list(t.shape)}) on {self.size} ranks; give sizes, one number for each rank")
        self._enter(REDUCE_SCATTER, t, dim + 256 * zlib.crc32(repr(sizes).encode()), frame)
        rows = t.detach().movedim(dim, 0)
        flat, each, at = rows.reshape(-1), math.prod(rows.shape[1:]), 0
        first, out = sum(sizes[:self.rank]) * each, torch.empty(sizes[self.rank] * each, dtype=t.dtype)
        for piece in self._pieces(flat):
            parts = self.swap(piece)
            begin, end = max(first, at), min(first + len(out), at + len(piece))
            if begin < end:
                add_in_order([part[begin - at:end - at] for part in parts], out[begin - first:end - first])
            at += len(piece)
        self.log.leave()
        return out.view(sizes[self.rank], *rows.shape[1:]).movedim(0, dim).contiguous()

    def all_gather(self, t, dim, sizes, frame):
        dim = self._dim(t, dim, "all_gather")
        shape = list(t.shape)
        logged, detail, shapes = shape, dim, [shape] * self.size
        if sizes is not None:
            sizes = [int(n) for n in sizes]
            if len(sizes) != self.size or sizes[self.rank] != shape[dim]:
                raise RankError(f"all_gather: sizes {sizes} do not fit {self.size} ranks of which rank {self.rank} "
                                f"has {shape[dim]} along dim {dim} (shape {shape})")
            # The log has the total of this dimension: ranks with different lengths must have equal records.
            *shapes, logged = [[*shape[:dim], n, *shape[dim + 1 :]] for n in [*sizes, sum(sizes)]]
            detail = dim + 256 * zlib.crc32(repr(sizes).encode())
        self._enter(ALL_GATHER, t, detail, frame, logged)
        if self.size == 1:
            out = t.detach().clone()
        else:
            parts = self._collect(_flat(t), [math.prod(s) for s in shapes])
            out = torch.cat([part.view(s) for part, s in zip(parts, shapes)], dim)
        self.log.leave()
        return out

    def broadcast(self, t, src, frame):
        if not 0 <= src < self.size:
            raise RankError(f"broadcast: src {src} is not one of the ranks 0 to {self.size - 1}")
        self._enter(BROADCAST, t, src, frame)
        if self.size > 1:
            flat = _flat(t)
            with _writing(t):
                for piece in self._pieces(flat):
                    parts = self.swap(piece)
                    if src != self.rank:
                        piece.copy_(parts[src])
                if src != self.rank:
                    _write_back(flat, t)
        self.log.leave()
        return t

    def barrier(self, frame):
        self._check_thread("barrier")
        if self.started:
            self.complete()
        self.log.enter(BARRIER, (), 0, 0, frame)
        if self.size > 1:
            self.swap(NOTHING)
        self.log.leave()

    def _enter(self, op, t, detail, frame, shape=None):
        self._check_tensor(t, OPS[op])
        self._check_thread(OPS[op])
        if self.started:
            self.complete()
        self.log.enter(op, t.shape if shape is None else shape, DTYPE_CODES[t.dtype], detail, frame)

    def _dim(self, t, dim, name):
        self._check_tensor(t, name)  # before its shape is looked at
        if not isinstance(dim, int) or not -t.ndim <= dim < t.ndim:
            raise RankError(f"{name}: dim {dim} does not exist in a tensor of shape {list(t.shape)}")
        return dim % t.ndim

    def _check_tensor(self, t, name):
        if not isinstance(t, torch.Tensor):
            raise RankError(f"{name} takes a tensor, not {type(t).__name__}")
        if t.dtype not in DTYPE_CODES or t.ndim > MAX_DIMS or not t.is_cpu or t.layout != torch.strided:
            raise RankError(f"{name} takes a dense CPU tensor of at most {MAX_DIMS} dimensions and a plain dtype, "
                            f"not {t.dtype} {list(t.shape)} on {t.device}")

    def _check_thread(self, name):
        if self.thread is not None and threading.get_ident() != self.thread:
            raise RankError(f"{name} was called from thread {threading.current_thread().name!r} of rank {self.rank}; "
                            "only the thread that runs the function may call collectives, or their order would be left "
                            "to chance")

    def _pieces(self, flat):
        step = self.chunk(flat.dtype)
        return (flat,) if flat.numel() <= step else flat.split(step)

    def _collect(self, flat, counts):
        """The whole flat tensors of all ranks, of `counts` elements each."""
        step = self.chunk(flat.dtype)
        if max(counts) <= step:
            return self.swap(flat, counts)
        parts = [torch.empty(n, dtype=flat.dtype) for n in counts]
        for begin in range(0, max(counts), step):
            lengths = [max(0, min(step, n - begin)) for n in counts]
            got = self.swap(flat[begin : begin + lengths[self.rank]], lengths)
            for part, piece, length in zip(parts, got, lengths):
                if length:
                    part[begin : begin + length].copy_(piece)
        return parts


def add_in_order(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of the flat parts to `out`, which is contiguous."""
    flat = _flat(out)
    with _writing(out):
        if len(parts) == 1:
            flat.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=flat)
        for part in parts[2:]:
            flat.add_(part)


NOTHING = torch.empty(0, dtype=torch.uint8)
_NO_MODE = nullcontext()


def _flat(t: torch.Tensor) -> torch.Tensor:
    """`t` as one dimension: the same memory where it is contiguous, a copy where it is not."""
    return t.detach().reshape(-1)


def _writing(t: torch.Tensor):
    """The mode for writing to `t`: a tensor that was made in inference mode can be written to in that mode only."""
    return torch.inference_mode() if t.is_inference() and not torch.is_inference_mode_enabled() else _NO_MODE


def _write_back(flat: torch.Tensor, t: torch.Tensor) -> None:
    if flat.data_ptr() != t.data_ptr():
        t.detach().copy_(flat.view(t.shape))
