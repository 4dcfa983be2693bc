"""What PyTorch does between the products of a decoding step, as compiled functions: see ``graph.py``.

Each takes the arena first, then what PyTorch's operation takes, and gives what that one gives, in the same bits, or
``NotImplemented``, where it is asked for something else.
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch

from tplab.kernels.compiled import NUMBERS, row_by_row, shared

LANES = 16  # numbers that are added or rounded are a multiple of so many
aten = torch.ops.aten


def _made(make: Callable, zeros: bool = False) -> Callable:
    """What ``make`` gives, but in the arena."""
    def on_arena(arena, *args, **kwargs):
        wanted = make(*args, **kwargs)
        taken = arena.take(wanted.shape, wanted.stride(), wanted.dtype)
        return taken if not zeros or _copy(taken, None) else NotImplemented
    return on_arena


def _like(arena, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Unfilled and contiguous, of the shape of x."""
    return arena.take(x.shape, torch.empty(x.shape, device="meta").stride(), dtype or x.dtype)


def _added(arena, a, b, *, alpha=1):
    alike = isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and a.dtype in NUMBERS
    if not alike or alpha != 1 or not a.is_contiguous() or not b.is_contiguous() or a.numel() % LANES:
        return NotImplemented
    out = _like(arena, a)
    _add(a.dtype)(a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel(), 1, 1)
    return out


def _stored(arena, x, dim, index, source):
    """``index_copy_`` of whole rows."""
    row = x[0].numel()
    if dim != 0 or not x.is_contiguous() or not source[0].is_contiguous() or x.dtype != source.dtype \
            or index.dtype != torch.int64 or not index.is_contiguous() or x.shape[1:] != source.shape[1:]:
        return NotImplemented
    _store()(x.data_ptr(), index.data_ptr(), source.data_ptr(), source.stride(0) * source.itemsize, row * x.itemsize,
             len(source), 1)
    return x


def _copied(arena, x, source, non_blocking=False):
    return x if _copy(x, source.expand(x.shape)) else NotImplemented


def _cloned(arena, x, *, memory_format=None):
    out = _like(arena, x)
    return out if _copy(out, x) else NotImplemented


def _converted(arena, x, dtype, non_blocking=False, copy=False, memory_format=None):
    if x.dtype == dtype:
        return x if not copy else NotImplemented
    out = _like(arena, x, dtype)
    return out if _copy(out, x) else NotImplemented


def _padded(arena, x, pad, mode="constant", value=None):
    """With rows of zeros behind the last one."""
    if x.ndim != 2 or list(pad[:3]) != [0, 0, 0] or len(pad) != 4 or mode != "constant" or value:
        return NotImplemented
    out = arena.take(torch.Size([len(x) + pad[3], x.shape[1]]), (x.shape[1], 1), x.dtype)
    _copy(out[len(x):], None)
    return out if _copy(out[:len(x)], x) else NotImplemented


def _joined(arena, parts, dim=0):
    sizes = [part.shape[dim] for part in parts]
    out = _like(arena, torch.cat(parts, dim), parts[0].dtype)
    each = zip(out.split(sizes, dim), parts)
    return out if all([_copy(place, part) for place, part in each]) else NotImplemented


def _copy(out: torch.Tensor, x: torch.Tensor | None) -> bool:
    """Fill ``out`` with x, or with zeros; False if they do not lie in rows."""
    rows = _rows(out, out if x is None else x)
    if rows is None:
        return False
    (count, size), out_row, x_row = rows
    if x is None:
        _fill()(out.data_ptr(), out_row * out.itemsize, size * out.itemsize, count, 1)
    elif x.dtype == out.dtype:
        _move()(x.data_ptr(), x_row * x.itemsize, out.data_ptr(), out_row * out.itemsize, size * x.itemsize, count, 1)
    elif x.dtype in NUMBERS and out.dtype in NUMBERS and size % LANES == 0:
        _convert(x.dtype, out.dtype)(x.data_ptr(), x_row * x.itemsize, out.data_ptr(), out_row * out.itemsize, size,
                                     count, 1)
    else:
        return False
    return True


def _rows(out: torch.Tensor, x: torch.Tensor) -> tuple[tuple[int, int], int, int] | None:
    """``(rows, numbers of a row), numbers from row to row of out, of x``; None if it takes more dimensions to say."""
    dims = [(size, *steps) for size, *steps in zip(out.shape, out.stride(), x.stride()) if size > 1]
    inner = 1
    while dims and dims[-1][1:] == (inner, inner):
        inner *= dims.pop()[0]
    while len(dims) > 1 and all(outer == dims[-1][0] * step for outer, step in zip(dims[-2][1:], dims[-1][1:])):
        (size, *steps), (outer, *_) = dims.pop(), dims.pop()
        dims.append((outer * size, *steps))
    if len(dims) > 1 or not out.numel():
        return None
    count, out_row, x_row = dims[0] if dims else (1, inner, inner)
    return ((count, inner), out_row, x_row)


_MAKERS = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default,
           aten.new_empty_strided.default)
OPERATIONS = {
    **{make: _made(make) for make in _MAKERS}, aten.zeros.default: _made(aten.zeros.default, zeros=True),
    aten.add.Tensor: _added, aten.index_copy_.default: _stored, aten.copy_.default: _copied,
    aten.clone.default: _cloned, aten.contiguous.default: _cloned, aten.to.dtype: _converted, aten.pad.default: _padded,
    aten.cat.default: _joined}


def _by_rows(arguments: str, row: str, declared: str = "") -> Callable:
    """A function of ``arguments``, how many rows there are, and 1: no thread is worth waking."""
    return shared(row_by_row(arguments, row, declared))


_SOURCE = """
  %x.offset = mul i64 %r, %x.row
  %x.at = getelementptr i8, ptr %x, i64 %x.offset
"""
_TARGET = """
  %y.offset = mul i64 %r, %y.row
  %y.at = getelementptr i8, ptr %y, i64 %y.offset
"""
_MOVED = "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"


@lru_cache
def _fill() -> Callable:
    return _by_rows("ptr %y, i64 %y.row, i64 %bytes", _TARGET + """
  call void @llvm.memset.p0.i64(ptr %y.at, i8 0, i64 %bytes, i1 false)
  br label %row.end
""", "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)")


@lru_cache
def _move() -> Callable:
    return _by_rows("ptr %x, i64 %x.row, ptr %y, i64 %y.row, i64 %bytes", _SOURCE + _TARGET + """
  call void @llvm.memcpy.p0.p0.i64(ptr %y.at, ptr %x.at, i64 %bytes, i1 false)
  br label %row.end
""", _MOVED)


@lru_cache
def _store() -> Callable:
    return _by_rows("ptr %y, ptr %index, ptr %x, i64 %x.row, i64 %bytes", _SOURCE + """
  %place.at = getelementptr i64, ptr %index, i64 %r
  %place = load i64, ptr %place.at
  %y.offset = mul i64 %place, %bytes
  %y.at = getelementptr i8, ptr %y, i64 %y.offset
  call void @llvm.memcpy.p0.p0.i64(ptr %y.at, ptr %x.at, i64 %bytes, i1 false)
  br label %row.end
""", _MOVED)


_SIXTEENS = Template("""
  br label %some

some:
  %n = phi i64 [0, %row], [%n.next, %some]
  %x.n = getelementptr $X, ptr %x.at, i64 %n
  %y.n = getelementptr $Y, ptr %y.at, i64 %n
  %given = load <16 x $X>, ptr %x.n, align 2
  $numbers
  store <16 x $Y> %found, ptr %y.n, align 2
  %n.next = add i64 %n, $LANES
  %n.more = icmp ult i64 %n.next, %size
  br i1 %n.more, label %some, label %row.end
""")


@lru_cache
def _convert(x: torch.dtype, y: torch.dtype) -> Callable:
    of_x, of_y = NUMBERS[x], NUMBERS[y]
    numbers = f"""
  %wide = {of_x["widen"]} <16 x {of_x["T"]}> %given to <16 x float>
  %found = {of_y["round"]} <16 x float> %wide to <16 x {of_y["T"]}>
"""
    return _by_rows("ptr %x, i64 %x.row, ptr %y, i64 %y.row, i64 %size", _SOURCE + _TARGET + _SIXTEENS.substitute(
        X=of_x["T"], Y=of_y["T"], numbers=numbers, LANES=LANES))


@lru_cache
def _add(dtype: torch.dtype) -> Callable:
    kind = NUMBERS[dtype]["T"]
    begin = """
  %x.at = getelementptr i8, ptr %x, i64 %r
  %y.at = getelementptr i8, ptr %y, i64 %r
  %z.at = getelementptr i8, ptr %z, i64 %r
"""
    numbers = f"""
  %z.n = getelementptr {kind}, ptr %z.at, i64 %n
  %others = load <16 x {kind}>, ptr %z.n, align 2
  %found = fadd <16 x {kind}> %given, %others
"""
    return _by_rows("ptr %x, ptr %z, ptr %y, i64 %size", begin + _SIXTEENS.substitute(
        X=kind, Y=kind, numbers=numbers, LANES=LANES))
