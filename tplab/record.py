"""Record what an engine computes, rank by rank. Copy this file beside any engine, add three lines, run it once:

    from record import record                                            # or: from tplab.record import record

    rank, world_size = dist.get_rank(), dist.get_world_size()            # under torchrun
    with record("run/", rank=rank, world_size=world_size) as rec:        # 1  on every rank, the same new folder
        rec.watch(model)                                                 # 2  every module's inputs and outputs
        rec.inputs(input_ids, positions)                                 # 3  before each call: what it is about
        model(input_ids, positions)

Then ``python -m tplab check run/ --model MODEL`` says which module is wrong.
"""

import ctypes
import json
import re
import sys
import threading
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

VERSION = 1
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
_ROOM = 1 << 16  # bytes kept free for a file's header; a call with more tensors goes on in a further file
_thread = threading.local()  # .record: a weak reference to this thread's recorder
_compiled = threading.Lock()
_recorders: list = []  # one entry for each watching recorder; the first holds the stance of torch.compile
_begun: Counter = Counter()  # how many recordings of rank N this process has begun in a folder of this name


class RecordError(RuntimeError):
    """The recorder cannot do this; the message says what would work."""


class record(AbstractContextManager):
    """Keep what one rank computes in ``folder/rankN``: a journal, and the tensors as safetensors, call by call.

    A call begins with :meth:`inputs`, or when a watched model runs again. Everything is written at once, so an engine
    that hangs or is killed leaves a folder that can be read; no rank waits for another. Some tensors cannot be kept:
    meta and fake tensors, quantised ones of a class of their own, those under vmap. They are never read, and the
    journal names them. Modules under torch.compile run uncompiled while a recorder watches. A replayed CUDA graph calls
    no module, so nothing is recorded, and a warning says so: run the engine eagerly (vLLM: ``enforce_eager``).

    SmolLM2-135M on 2 ranks in float32 costs each rank 0.48 GB and 1.0 s of CPU time for 512 tokens (the forward pass
    itself takes 1.5 s), 1.2 MB and 0.05 s for a decode step.

    Args:
        layers: keep only these layers (``[0, 1]``); modules outside of the layers are always kept.
        calls: keep only the first so many calls, or the calls with these numbers (``[0, 5]``).
        max_bytes: the size of this rank's files, beyond which no tensor is kept. The journal names the others.
    """

    def __init__(self, folder, *, rank: int, world_size: int, layers: Iterable[int] | None = None,
                 calls: int | Iterable[int] | None = None, max_bytes: int | None = None):
        if not 0 <= rank < world_size:
            raise RecordError(f"there is no rank {rank} of {world_size}; ranks count from 0 to world_size - 1")
        if (current := getattr(_thread, "record", lambda: None)()) and not current._ended:
            raise RecordError("this thread records already; watch several models in one record(...)")
        self._layers = _numbers("layers", layers)
        self._calls = range(calls) if type(calls) is int else _numbers("calls", calls)
        if max_bytes is not None and type(max_bytes) is not int:
            raise RecordError(f"max_bytes must be a whole number of bytes, not {max_bytes!r}")
        self._folder = Path(folder) / f"rank{rank}"
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError:
            raise RecordError(f"{folder} holds rank {rank} of an earlier run; record into a new folder") from None
        self._max_bytes, self._bytes, self._exit = max_bytes, 0, ExitStack()
        self._names: set[tuple[str, str]] = set()
        self._call, self._skips, self._running, self._weights = -1, False, None, _Files(self, "parameters")
        self._lock, self._ended, self._ran, self._watched = threading.RLock(), False, True, False
        weakref.finalize(self, self._exit.close)  # for a recorder that is dropped without its end
        self._journal = self._exit.enter_context(open(self._folder / "manifest.jsonl", "xb"))
        self._line(format="tplab-record", version=VERSION, run=_run(self._folder), rank=int(rank),
                   world_size=int(world_size), torch=torch.__version__)
        _thread.record = weakref.ref(self)

    def __exit__(self, kind=None, error=None, traceback=None):
        with self._exit, self._lock:
            self._ended = True
            self._weights.close()
            self._end(error)

    def watch(self, model: torch.nn.Module, prefix: str = "") -> None:
        """Record inputs and outputs of ``model`` and all its submodules under their dotted names, behind ``prefix``."""
        if not isinstance(model, torch.nn.Module):
            raise RecordError(f"watch() takes a torch.nn.Module, not {type(model).__name__}; tensor() takes the rest")
        if isinstance(model, torch.jit.ScriptModule):
            raise RecordError("a ScriptModule runs its modules without hooks; watch the module that it was made from")
        if not self._watched:
            self._exit.enter_context(_eager())
        self._watched = True
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        for name, module in model.named_modules(prefix=prefix):
            if not hasattr(module, "_orig_mod"):
                name = self._new("module", name)
                before = partial(_call, weakref.WeakMethod(self._before), name, module is model)
                after = partial(_call, weakref.WeakMethod(self._after), name)
                self._exit.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                self._exit.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)

    def inputs(self, input_ids, positions=None, sequences=None, texts=None) -> None:
        """Begin a call, and describe its tokens. What is said here is believed; what is wrong with it is found.

        Args:
            input_ids: the token of every row that the modules get, ``[tokens]`` or ``[batch, tokens]``; -1 is padding.
            positions: each token's position in its text, from 0; -1 is padding. In a decode step, the new token's.
            sequences: the number of the text that each line of the batch, or each token of flat ids, belongs to, the
                same from call to call; -1 is padding.
            texts: ``{sequence: ids}``, all token ids of a sequence up to its last one in this call, where the calls
                that were recorded do not tell them. Give it for a prefix that was found in the cache, for a cache that
                another server computed or that was restored, and where drafted tokens were taken back. The keys and
                values before this call's are then those of a recorded text with the same beginning, or Hugging Face's.
        """
        tensors = dict(input_ids=input_ids, positions=positions, sequences=sequences)
        tensors |= {f"texts {key}": ids for key, ids in (texts or {}).items()}
        if texts and sequences is None:
            raise RecordError("texts={sequence: ids} names sequences by their numbers; give sequences too")
        try:
            tensors = {name: torch.as_tensor(value) for name, value in tensors.items() if value is not None}
        except (TypeError, ValueError, RuntimeError) as error:
            raise RecordError(f"input_ids, positions and sequences must be whole numbers in lines of one length (-1 is "
                              f"padding), or flat: {error}") from None
        for name, value in tensors.items():
            if value.numel() and not DTYPES.get(value.dtype, "").startswith(("I", "U")):
                raise RecordError(f"{name} must be whole numbers, not {value.dtype}")
        inputs = {name: value.tolist() for name, value in tensors.items()}
        if texts:
            inputs["texts"] = {str(int(key)): inputs.pop(f"texts {key}") for key in texts}
        with self._lock:
            self._begin(**inputs)
            self._ran = not self._watched

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor that is no module's output, such as ``"layers.3.self_attn.q_rope"``."""
        with self._lock:
            if self._call < 0:
                self._begin()
            self._ran = True
            if not self._skips:
                self._keep(name, "tensor", self._count["tensor", name], "", tensor)
            self._count["tensor", name] += 1

    def parameters(self, model: torch.nn.Module | Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Keep the weights and buffers that this rank holds, so that loading and slicing can be checked too."""
        if isinstance(model, torch.nn.Module):
            model = dict([*model.named_parameters("", True, False), *model.named_buffers("", True, False)])  # all names
        with self._lock:
            for name, tensor in model.items():
                self._keep(self._new("parameter", f"{prefix}.{name}" if prefix else name), "parameter", 0, "", tensor)

    def _new(self, kind, name):
        name = re.sub(r"\b_orig_mod\.|\._orig_mod$", "", name)
        if (kind, name) in self._names:
            raise RecordError(f"there is a {kind} {name!r} already; give this model's names a prefix")
        self._names.add((kind, name))
        return name

    def _before(self, name, root, module, args, kwargs):
        with self._lock:
            self._ran = True
            if self._call < 0 or root and self._running in (None, name) and self._count[name]:
                self._begin()
            if root and self._running is None:
                self._running = name  # a watched model inside of it begins no call
            self._open[name, threading.get_ident()].append((self._count[name], sys.exc_info()[1]))
            if not self._skips:
                self._line(event="enter", name=name)
                self._keep(name, "in", self._count[name], type(module).__name__, dict(enumerate(args)) | kwargs)
            self._count[name] += 1

    def _after(self, name, module, args, kwargs, output):
        with self._lock:
            self._running = None if name == self._running else self._running
            entered = self._call >= 0 and self._open[name, threading.get_ident()]
            if entered and not self._skips:  # in this call
                nth, known = entered.pop()
                error = sys.exc_info()[1] if output is None else None
                self._keep(name, "out", nth, type(module).__name__, output)
                self._line(event="leave", name=name, error=None if error is known else error)

    def _begin(self, **inputs):
        self._end()
        self._call += 1
        self._files, self._open = _Files(self, f"call{self._call}"), defaultdict(list)
        self._count: Counter = Counter()
        self._skips = self._calls is not None and self._call not in self._calls
        self._line(event="call", call=self._call, skipped=self._skips, **inputs)

    def _end(self, error=None):
        if self._call >= 0:
            self._files.close()
            if not self._ran and error is None and not self._skips:
                warnings.warn(f"record: no watched module ran in call {self._call}; a replayed graph calls none: run "
                              "the engine eagerly while it is recorded", stacklevel=3)
            self._line(event="end", error=error, **({} if self._ran else {"ran": False}))

    def _keep(self, name, kind, nth, module_class, value):
        layer = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        left_out = layer and self._layers is not None and int(layer[1]) not in self._layers
        if not name.isprintable() or len(name) > 1000:
            raise RecordError(f"{name[:100]!r} cannot be a name: printable characters only, at most 1000")
        for path, tensor in dict(_tensors(value)).items():
            about, key = dict(name=name, kind=kind, path=path if path.isprintable() else ascii(path), nth=nth), None
            plain, why = (None, f"layers={self._layers}") if left_out else _plain(tensor)
            if plain is not None:
                key = (self._weights if kind == "parameter" else self._files).put(about, plain)
                why = f"max_bytes={self._max_bytes}"
            what = dict(event="left out", why=why) if key is None or plain is None else dict(
                event="tensor", module_class=module_class, dtype=DTYPES[plain.dtype], shape=list(plain.shape), key=key)
            self._line(**what, **about)

    def _line(self, **content):
        self._journal.write(json.dumps(content, default=lambda e: f"{type(e).__name__}: {e}"[:300]).encode() + b"\n")
        self._journal.flush()


class _Files:
    """The safetensors files of one call: tensors are appended as they come, a file's header is written at its end;
    until then the journal alone says what lies where, one tensor after the other without gaps."""

    def __init__(self, rec, stem):
        self.rec, self.stem, self.part, self.file, self.buffer = rec, stem, 0, None, bytearray()
        self.seen: dict[tuple, tuple] = {}
        self.header: dict[str, dict] = {}
        self.size = self.used = 0

    def put(self, about, tensor):
        """The tensor's number in its file, or None if max_bytes forbids it."""
        label = about["name"] if self.stem == "parameters" else " ".join(map(str, about.values()))
        size = tensor.nbytes
        data = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"").cast("B")
        if self.file is None or self.used + 6 * len(label) + 400 > _ROOM:
            self.close()
            name = f"{self.stem}{f'.{self.part}' if self.part else ''}.safetensors"
            self.file = open(self.rec._folder / name, "x+b")
            self.rec._line(event="file", file=name, room=_ROOM)
            self.part, self.seen, self.header, self.size, self.used = self.part + 1, {}, {}, 0, 2
        alike = tensor.dtype, size, bytes(data[:64]), bytes(data[-64:])
        if alike in self.seen:  # most inputs are another module's output; all bytes decide
            self.buffer.extend(bytes(max(0, size - len(self.buffer))))  # one for all: fresh memory is slow
            self.file.seek(self.seen[alike][1])
            self.file.readinto(memoryview(self.buffer)[:size])
            if self.buffer.startswith(data):
                return self.seen[alike][0]
        if self.rec._max_bytes is not None and self.rec._bytes + size > self.rec._max_bytes:
            return None
        self.seen[alike] = key, start = len(self.header), 8 + _ROOM + self.size
        self.header[label] = dict(dtype=DTYPES[tensor.dtype], shape=list(tensor.shape),
                                  data_offsets=[self.size, self.size + size])
        self.file.seek(start)
        self.file.write(data)
        self.file.flush()
        self.used += len(json.dumps({label: self.header[label]}))
        self.size, self.rec._bytes = self.size + size, self.rec._bytes + size
        return key

    def close(self):
        if self.file:
            self.file.seek(8)
            self.file.write(json.dumps(self.header).encode().ljust(_ROOM))
            self.file.seek(0)
            self.file.write(_ROOM.to_bytes(8, "little"))  # last: without its length there is no header
            self.file.close()
            self.file = None


def _tensors(value, path="", depth=0):
    """The tensors in tuples, lists, mappings and dataclasses, with their paths: ``"0"``, ``"logits"``, ``"1.0"``."""
    if isinstance(value, torch.Tensor):
        yield path, value
    if isinstance(value, list | tuple):
        value = dict(zip(getattr(value, "_fields", range(len(value))), value))
    elif names := getattr(type(value), "__dataclass_fields__", None):
        value = {name: getattr(value, name, None) for name in names}
    if isinstance(value, Mapping) and depth < 8:
        for key, part in value.items():
            yield from _tensors(part, f"{path}.{key}" if path else str(key), depth + 1)


def _plain(tensor):
    """(The tensor's values in order, on the CPU, ""); or (None, why there are none)."""
    kind = type(tensor).__name__
    try:
        for unwrap in ("detach", "to_local", "wait"):  # this rank's share of a DTensor; an open collective's result
            tensor = getattr(tensor, unwrap)() if hasattr(tensor, unwrap) else tensor
        if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
            return None, f"{tensor.dtype} in layout {tensor.layout} on {tensor.device} cannot be kept"
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None, "tensors cannot be kept while a CUDA graph is captured"
        plain = tensor.cpu().contiguous().resolve_conj().resolve_neg()
        if plain.numel() and not plain.data_ptr():  # it wraps other tensors, or is fake
            raise TypeError("it has no memory of its own")
        return plain, ""
    except Exception as error:  # a tensor's class may lack any operation: the engine goes on
        return None, f"{kind} cannot be kept: {type(error).__name__}: {' '.join(str(error).split())[:100]}"


def _numbers(name, numbers):
    """A sorted list of whole numbers; None stays None."""
    if numbers is None:
        return None
    if isinstance(numbers, Iterable) and not isinstance(numbers, str):
        numbers = list(numbers)
        if all(type(number) is int for number in numbers):
            return sorted(numbers)
    raise RecordError(f"{name} must be whole numbers, such as [0, 1], not {numbers!r}")


@contextmanager
def _eager():
    """Compiled modules run uncompiled while any thread of the process records: hooks cannot be compiled whole."""
    with _compiled:
        try:
            _recorders.append(torch.compiler.set_stance("force_eager") if not _recorders else None)
        except ImportError:  # for example without numpy: then nothing can be compiled
            _recorders.append(None)
    try:
        yield
    finally:
        with _compiled:
            stance = _recorders.pop(-1 if len(_recorders) > 1 else 0)
            if stance is not None:
                stance.__exit__(None, None, None)


def _call(method, *args):
    """Call a hook of a recorder that may be gone."""
    if method := method():
        method(*args)


def _run(folder):
    """A word that all ranks of this run share and no other run has; no rank waits for another."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return f"inode {folder.parent.stat().st_ino}"
    _begun.update([key := folder.parts[-2:]])  # in one process group, ranks begin the same runs one after the other
    store = torch.distributed.distributed_c10d._get_default_store()
    return store.compare_set(f"record {key[0]} {_begun[key]}", "", f"changed {folder.stat().st_mtime_ns}").decode()
