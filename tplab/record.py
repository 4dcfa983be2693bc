"""Record what an engine computes, rank by rank. Copy this file beside any engine, add three lines, run it once:

    from record import record                                            # or: from tplab.record import record

    with record("run/", rank=rank, world_size=world_size) as rec:        # 1  on every rank, the same folder
        rec.watch(model)                                                 # 2  every module's inputs and outputs
        rec.inputs(input_ids, positions)                                 # 3  before each call: what it is about
        model(input_ids, positions)

(Under torchrun: ``rank=torch.distributed.get_rank()``.) Then: ``python -m tplab check run/ --model MODEL``.
"""

import ctypes
import json
import re
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

VERSION = 1
ROOM = 1 << 16  # bytes kept free for a file's header; a call with more tensors goes on in a further file
DTYPES = {getattr(torch, name): stored for stored, name in {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U8": "uint8", "BOOL": "bool"}.items() if hasattr(torch, name)}
_WRAPPER = re.compile(r"(^|\.)_orig_mod(?=\.|$)")  # what torch.compile puts into names
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_thread = threading.local()  # .recording: whether this thread records already


class RecordError(RuntimeError):
    """The recorder cannot do what was asked; the message says what would work."""


class record:
    """Keep what one rank computes in ``folder/rankN``: a journal, and the tensors as safetensors, call by call.

    A call begins with :meth:`inputs`, or when a watched model runs again. Everything is written as it happens, so
    an engine that hangs or is killed half way leaves a folder that can be read, and no rank waits for another.
    Modules under torch.compile run uncompiled meanwhile.

    Args:
        folder: the same for all ranks; no earlier run may be in it.
        rank, world_size: which rank this is, and of how many.
        layers: keep only these layers (``[0, 1]``); what belongs to no layer is always kept.
        calls: keep only so many calls, or those with these numbers (``[0, 5]``).
        max_bytes: keep no tensor that would take this rank beyond it. What was left out is said.
    """

    def __init__(self, folder, *, rank: int, world_size: int, layers: Iterable[int] | None = None,
                 calls: int | Iterable[int] | None = None, max_bytes: int | None = None):
        if not 0 <= rank < world_size:
            raise RecordError(f"there is no rank {rank} of {world_size}; ranks count from 0 to world_size - 1")
        if getattr(_thread, "recording", False):
            raise RecordError("this thread records already; watch several models in one record(...)")
        self._layers = layers if layers is None else sorted(layers)
        self._calls = calls if calls is None else list(range(calls)) if isinstance(calls, int) else sorted(calls)
        self._max_bytes, self._bytes = max_bytes, 0
        self._folder = Path(folder) / f"rank{rank}"
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._folder.mkdir()
        except FileExistsError:
            raise RecordError(f"{folder} holds rank {rank} of an earlier run; record into a new folder") from None
        self._journal = open(self._folder / "manifest.jsonl", "xb", buffering=0)
        self._line(format="tplab-record", version=VERSION, run=_run(self._folder.parent), rank=rank,
                   world_size=world_size, torch=torch.__version__)
        self._names, self._hooks = set(), []
        self._call, self._skipped = -1, False  # its number; whether calls= leaves it out
        self._files = self._stack = self._ran = self._count = self._left = None  # of the call
        self._eager = torch.compiler.set_stance("force_eager")  # compiled code calls no hooks
        _thread.recording = True

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the recording, as the end of the ``with`` block does, with the error that ended it."""
        if not self._journal.closed:
            self._end(error)
            self._line(event="close")
            self._journal.close()
            for hook in self._hooks:
                hook.remove()
            self._eager.__exit__(None, None, None)
            _thread.recording = False

    def watch(self, model: nn.Module, prefix: str = "") -> None:
        """Record inputs and outputs of ``model`` and all its submodules under their dotted names, behind ``prefix``."""
        if not isinstance(model, nn.Module):
            raise RecordError(f"watch() takes a torch.nn.Module, not {type(model).__name__}; tensor() takes the rest")
        root = getattr(model, "_orig_mod", model)
        for name, module in root.named_modules(prefix=prefix):
            if hasattr(module, "_orig_mod"):
                continue  # a wrapper of torch.compile; what it wraps follows
            name = _WRAPPER.sub("", name)
            if name in self._names:
                raise RecordError(f"a module {name!r} is watched already; say a prefix: watch(model, 'draft')")
            self._names.add(name)
            self._hooks += [
                module.register_forward_pre_hook(partial(self._before, name, module is root), with_kwargs=True),
                module.register_forward_hook(partial(self._after, name), with_kwargs=True, always_call=True)]

    def inputs(self, input_ids, positions=None, sequences=None) -> None:
        """Begin a call, and say what it is about.

        Args:
            input_ids: token ids, ``[tokens]`` or ``[batch, tokens]``.
            positions: of these tokens, in the same shape or ``[tokens]``.
            sequences: the number of the sequence that each row of the batch belongs to, or each token of flat ids.
        """
        said = {}
        for name, value in dict(input_ids=input_ids, positions=positions, sequences=sequences).items():
            if value is not None:
                value = torch.as_tensor(value)
                if value.numel() and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
                    raise RecordError(f"{name} must be whole numbers, not {value.dtype}")
                said[name] = value.tolist()
        self._begin(**said)

    def tensor(self, name: str, tensor: Tensor) -> None:
        """Record what no module computes, such as ``"layers.3.self_attn.q_rope"``."""
        if self._call < 0:
            self._begin()
        nth = self._next(name)
        for path, part in _tensors(tensor):
            self._keep(name, "tensor", path, nth, "", part)

    def parameters(self, model: nn.Module | Mapping[str, Tensor], prefix: str = "") -> None:
        """Keep the weights and buffers that this rank holds, so that loading and slicing can be checked too."""
        if isinstance(model, nn.Module):
            model = {_WRAPPER.sub("", name): tensor for kind in (model.named_parameters, model.named_buffers)
                     for name, tensor in kind(prefix=prefix, remove_duplicate=False)}
        elif prefix:
            model = {f"{prefix}.{name}": tensor for name, tensor in model.items()}
        if (self._folder / "parameters.safetensors").exists():
            raise RecordError("parameters() was called before; hand over all of them at once, as a dictionary")
        call = self._files, self._left, self._skipped
        self._files = _Files(self._line, self._folder / "parameters", room=sum(6 * len(name) + 200 for name in model))
        self._left, self._skipped = {}, False
        for name, tensor in model.items():
            self._keep(name, "parameter", "", 0, "", tensor)
        self._say_left_out()
        self._files.close()
        self._files, self._left, self._skipped = call

    def _before(self, name, root, module, args, kwargs):
        if root and any(name == entered for entered, _, _ in self._stack or ()):
            self._stack.clear()  # left there by an interrupted run
        if self._call < 0 or root and not self._stack and name in self._ran:
            self._begin()
        if root:
            self._ran.add(name)
        nth = self._next(name)
        self._stack.append((name, nth, sys.exc_info()[1]))
        if not self._skipped:
            self._line(event="enter", name=name, nth=nth)
            for path, tensor in (*_tensors(args), *_tensors(kwargs)):
                self._keep(name, "in", path, nth, type(module).__name__, tensor)

    def _after(self, name, module, args, kwargs, output):
        if not any(name == entered for entered, _, _ in self._stack or ()):
            return  # it was entered in an earlier call
        while (top := self._stack.pop())[0] != name:
            pass
        _, nth, error_before = top
        error = sys.exc_info()[1]
        raised = output is None and error is not None and error is not error_before
        if not self._skipped:
            for path, tensor in _tensors(output):
                self._keep(name, "out", path, nth, type(module).__name__, tensor)
            self._line(event="leave", name=name, nth=nth, error=_words(error) if raised else None)

    def _begin(self, **said):
        self._end()
        self._call += 1
        self._skipped = self._calls is not None and self._call not in self._calls
        self._files = _Files(self._line, self._folder / f"call{self._call}")
        self._stack, self._ran, self._count, self._left = [], set(), Counter(), {}
        self._line(event="call", call=self._call, skipped=self._skipped, **said)

    def _end(self, error=None):
        if self._call >= 0:
            self._say_left_out()
            self._files.close()
            self._line(event="end", call=self._call, error=_words(error) if error else None)

    def _next(self, name):
        self._count[name] += 1
        return self._count[name] - 1

    def _keep(self, name, kind, path, nth, module_class, tensor):
        if self._skipped:
            return
        about = dict(name=name, kind=kind, path=path, nth=nth)
        layer = _LAYER.search(name)
        if layer and self._layers is not None and int(layer.group(1)) not in self._layers:
            return self._leave_out(about, f"layers={self._layers}")
        plain = _plain(tensor)
        if isinstance(plain, str):
            return self._leave_out(about, plain)
        data = _bytes(plain)
        key = self._files.find(tensor, data)
        if key is None:
            if self._max_bytes is not None and self._bytes + len(data) > self._max_bytes:
                return self._leave_out(about, f"max_bytes={self._max_bytes}")
            self._bytes += len(data)
            key = self._files.write(about, tensor, plain, data)
        self._line(event="tensor", **about, module_class=module_class, dtype=DTYPES[plain.dtype],
                   shape=list(plain.shape), key=key)

    def _leave_out(self, about, why):
        if why not in self._left:
            self._left[why] = dict(event="left out", kind=about["kind"], why=why, first=about["name"], count=0)
            self._line(**self._left[why])
        self._left[why]["count"] += 1

    def _say_left_out(self):
        for line in self._left.values():
            self._line(**line)

    def _line(self, **content):
        _write(self._journal, json.dumps(content).encode() + b"\n")


class _Files:
    """The safetensors files of one call: tensors are appended as they come, a file's header is written at its end.

    Until then the journal says what lies where: the tensors of a file follow each other without gaps.
    """

    def __init__(self, line, path, room=ROOM):
        self.line, self.path, self.part, self.file = line, path, -1, None
        self.room = room + -room % 8

    def find(self, tensor, data):
        """The number of the tensor that holds these very bytes: an earlier output that is now an input, or a view."""
        key, start = self.seen.get(_address(tensor, data), (None, 0)) if self.file else (None, 0)
        if key is not None:
            written = bytearray(len(data))
            self.file.seek(start)
            self.file.readinto(written)
            if written == data:  # memory is used again, and engines work in place: the address alone says nothing
                return key
        return None

    def write(self, about, tensor, plain, data):
        name, kind, *rest = about.values()
        label = name if kind == "parameter" else " ".join(map(str, (name, kind, *rest)))
        if self.file is None or self.used + 6 * len(label) + 200 > self.room:
            self._next_part()
        key = len(self.header)
        label = name if kind == "parameter" else f"{key} {label}"
        entry = dict(dtype=DTYPES[plain.dtype], shape=list(plain.shape),
                     data_offsets=[self.size, self.size + len(data)])
        self.header[label] = entry
        self.used += len(json.dumps({label: entry}))
        start = 8 + self.room + self.size
        self.file.seek(start)
        _write(self.file, data)
        self.seen[_address(tensor, data)] = key, start
        self.size += len(data)
        return key

    def _next_part(self):
        self.close()
        self.part += 1
        path = self.path.with_name(f"{self.path.name}{f'.{self.part}' if self.part else ''}.safetensors")
        self.file = open(path, "x+b", buffering=0)
        self.header, self.seen, self.used, self.size = {}, {}, 2, 0
        self.line(event="file", file=path.name, room=self.room)

    def close(self):
        if self.file:
            self.file.seek(8)
            _write(self.file, json.dumps(self.header).encode().ljust(self.room))
            self.file.seek(0)  # the length last: only with it the file has a header
            _write(self.file, self.room.to_bytes(8, "little"))
            self.file.close()
            self.file = None


def _tensors(value, path="", depth=0) -> Iterator[tuple[str, Tensor]]:
    """All tensors in tuples, lists, mappings and dataclasses, with their paths: ``"0"``, ``"logits"``, ``"1.0"``."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth < 8:
        if isinstance(value, Mapping):
            parts = value.items()
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            parts = zip(value._fields, value)
        elif isinstance(value, list | tuple):
            parts = enumerate(value)
        elif is_dataclass(value) and not isinstance(value, type):
            parts = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
        else:
            parts = ()
        for key, part in parts:
            yield from _tensors(part, f"{path}.{key}" if path else str(key), depth + 1)


def _plain(tensor):
    """The tensor's values in order, on the CPU; or why there are none."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # a DTensor: this rank's share
    if hasattr(tensor, "wait"):
        tensor = tensor.wait()  # the result of a collective that still runs
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
        return f"tensors of {tensor.dtype} with layout {tensor.layout} on {tensor.device} are not recorded"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RecordError("a CUDA graph is captured, whose replays nothing can record; run the engine eagerly")
    return tensor.cpu().contiguous().resolve_conj().resolve_neg()


def _bytes(tensor):
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"").cast("B")


def _address(tensor, data):
    return tensor.data_ptr(), str(tensor.dtype), len(data)


def _write(file, data):
    data = memoryview(data)
    while len(data):  # a long write may stop early
        data = data[file.write(data):]


def _words(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _run(folder):
    """One word for this run that all ranks agree on, and no other run has; found without waiting for a rank."""
    mine = uuid.uuid4().hex
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store().compare_set("tplab-record", "", mine).decode()
    try:
        with open(folder / "run", "x") as file:
            file.write(mine)
        return mine
    except FileExistsError:
        for _ in range(100):  # it is written within a moment of being made
            if word := (folder / "run").read_text():
                return word
            time.sleep(0.01)
        raise RecordError(f"{folder / 'run'} is empty; record into a new folder") from None
