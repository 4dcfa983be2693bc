"""How functions, arguments and results are sent between processes, and the error for what cannot be sent."""

import inspect
import io
import pickle
from types import CodeType

import cloudpickle
import torch

from tplab.ranks.errors import RankError

loads = pickle.loads


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        # Plain pickling sends a tensor's whole storage, also for a view of ten rows of it.
        if type(obj) is torch.Tensor and _plain(obj):
            raw = obj.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if obj.numel() else b""
            return _tensor, (raw, obj.dtype, tuple(obj.shape))
        # From 3.1.3 on, cloudpickle omits the file's name; errors on ranks need it to show the cell and the line.
        if type(obj) is CodeType:
            return _code, (obj.co_filename, *self.dispatch_table[CodeType](obj))
        return super().reducer_override(obj)


def _plain(t):
    dense = t.layout == torch.strided and t.device.type == "cpu" and not t.is_quantized
    return dense and not t.requires_grad and not t.is_conj() and not t.is_neg()


def _tensor(raw, dtype, shape):
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)


def _code(filename, kind, args):
    return kind(*args).replace(co_filename=filename)


def dumps(obj) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(obj)
    return buffer.getvalue()


def dumps_call(fn, args, kwargs, patches=()) -> bytes:
    """The call as bytes. Raises `RankError`, which names the part, if it cannot be sent."""
    if not callable(fn):
        raise RankError(f"run takes a function, not {type(fn).__name__}")
    try:
        return dumps((fn, args, kwargs, patches))
    except Exception as error:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        parts = [(f"argument {i} ", value) for i, value in enumerate(args)]
        parts += [(f"argument {key}", value) for key, value in kwargs.items()] + [(f"function {name}", fn)]
        parts += [(f"the replacement for {patch.target}", patch.replacement) for patch in patches]
        unsendable = (find_unsendable(value, path.strip()) for path, value in parts)
        path, value, why = next(filter(None, unsendable), None) or ("the call", fn, error)
        raise RankError(f"{path} ({type(value).__name__}) cannot be sent to the ranks: {why}. No rank has been touched."
                        ) from None


def find_unsendable(value, path: str, depth: int = 4):
    """(path, object, error) of the innermost part that cannot be pickled; None if everything can."""
    try:
        dumps(value)
        return None
    except Exception as error:
        why = error
    for name, part in _parts(value) if depth else ():
        if unsendable := find_unsendable(part, path + name, depth - 1):
            return unsendable
    return path, value, why


def _parts(value):
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if inspect.isfunction(value):
        scope = inspect.getclosurevars(value)
        return [(f" uses {name}", part) for name, part in {**scope.nonlocals, **scope.globals}.items()]
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
