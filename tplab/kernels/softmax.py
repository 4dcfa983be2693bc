"""Attention's weights, ``softmax(scores * scaling)`` where nothing is hidden, in one pass, with PyTorch's bits.

PyTorch goes over the scores seven times: it multiplies, copies, hides, finds the largest, takes e to the power of
each, adds up, divides.
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch

from tplab.kernels.compiled import has, row_by_row, shared, threads_for
from tplab.kernels.exponential import declared, exponential

_LANES = {"AVX512": 16, "AVX2": 8}  # numbers in PyTorch's vectors, by what torch.backends.cpu.get_cpu_capability() says


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor | None:
    """The weights of float32 ``scores``, which they replace, with the bits of :func:`masked_softmax_by_torch`.

    ``scores`` is ``[batch, heads, queries, keys]`` and contiguous, ``mask`` a boolean ``[batch, 1, queries, keys]``,
    True where a query must not look. None, and the scores as they were, where there is no such loop: for other dtypes,
    for fewer keys than a vector holds (PyTorch adds those up in another order), for a scaling that is no number of
    Python's, and where a gradient is wanted.
    """
    batch, _, queries, keys = scores.shape
    if scores.dtype != torch.float32 or mask.dtype != torch.bool or mask.shape != (batch, 1, queries, keys) \
            or scores.requires_grad or not scores.is_contiguous() or not isinstance(scaling, int | float):
        return None
    lanes = torchs_lanes()
    loop = _loop(lanes) if lanes and keys >= lanes else None
    return None if loop is None else _weighed(loop, scores, mask.contiguous(), scaling)


def masked_softmax_by_torch(scores: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """In Hugging Face's steps, which do not change the scores."""
    return torch.softmax((scores * scaling).masked_fill(mask, float("-inf")), dim=-1)


_DECLARED = Template("""
declare $V @llvm.masked.load.v${lanes}f32.p0(ptr, i32, <$lanes x i1>, $V)
declare <$lanes x i8> @llvm.masked.load.v${lanes}i8.p0(ptr, i32, <$lanes x i1>, <$lanes x i8>)
declare void @llvm.masked.store.v${lanes}f32.p0($V, ptr, i32, <$lanes x i1>)
""")
_ARGUMENTS = "ptr %scores, ptr %mask, i64 %mask.apart, float %scaling, i64 %heads, i64 %queries, i64 %keys"
_ROW = Template("""
  %scaling.0 = insertelement $V poison, float %scaling, i32 0
  %scaling.each = shufflevector $V %scaling.0, $V poison, <$lanes x i32> zeroinitializer
  %rows = mul i64 %heads, %queries
  %sequence = udiv i64 %r, %rows
  %query = urem i64 %r, %queries
  %sequence.first = mul i64 %sequence, %queries
  %mask.row = add i64 %sequence.first, %query
  %mask.offset = mul i64 %mask.row, %mask.apart
  %mask.at = getelementptr i8, ptr %mask, i64 %mask.offset
  %offset = mul i64 %r, %keys
  %at = getelementptr float, ptr %scores, i64 %offset
  br label %hide

hide:
  %k.0 = phi i64 [0, %row], [%k.0.next, %hide]
  %largest = phi $V [splat (float 0xFFF0000000000000), %row], [%larger, %hide]
  $where_0
  %mask.from = getelementptr i8, ptr %mask.at, i64 %k.0
  %given = call $V @llvm.masked.load.v${lanes}f32.p0(ptr %from.0, i32 4, <$lanes x i1> %there.0, $V zeroinitializer)
  %flags = call <$lanes x i8> @llvm.masked.load.v${lanes}i8.p0(ptr %mask.from, i32 1, <$lanes x i1> %there.0,
                                                              <$lanes x i8> splat (i8 1))
  %hidden = icmp ne <$lanes x i8> %flags, zeroinitializer
  %scaled = fmul $V %given, %scaling.each
  %score = select <$lanes x i1> %hidden, $V splat (float 0xFFF0000000000000), $V %scaled
  call void @llvm.masked.store.v${lanes}f32.p0($V %score, ptr %from.0, i32 4, <$lanes x i1> %there.0)
  %is.larger = fcmp ogt $V %score, %largest
  %larger = select <$lanes x i1> %is.larger, $V %score, $V %largest
  %k.0.next = add i64 %k.0, $lanes
  %k.0.more = icmp ult i64 %k.0.next, %keys
  br i1 %k.0.more, label %hide, label %top

top:
  $largest_of_all
  br label %raise

raise:
  %k.1 = phi i64 [0, %top], [%k.1.next, %raise]
  %sum = phi $V [zeroinitializer, %top], [%sum.next, %raise]
  $where_1
  %masked = call $V @llvm.masked.load.v${lanes}f32.p0(ptr %from.1, i32 4, <$lanes x i1> %there.1, $V zeroinitializer)
  %x = fsub $V %masked, %larger.all
  $exp
  call void @llvm.masked.store.v${lanes}f32.p0($V %exp, ptr %from.1, i32 4, <$lanes x i1> %there.1)
  %sum.more = fadd $V %sum, %exp
  %sum.next = select <$lanes x i1> %there.1, $V %sum.more, $V %sum
  %k.1.next = add i64 %k.1, $lanes
  %k.1.more = icmp ult i64 %k.1.next, %keys
  br i1 %k.1.more, label %raise, label %added

added:
  $sum_of_all
  %share = fdiv $V splat (float 1.0), %sum.next.all
  br label %divide

divide:
  %k.2 = phi i64 [0, %added], [%k.2.next, %divide]
  $where_2
  %power = call $V @llvm.masked.load.v${lanes}f32.p0(ptr %from.2, i32 4, <$lanes x i1> %there.2, $V zeroinitializer)
  %weight = fmul $V %power, %share
  call void @llvm.masked.store.v${lanes}f32.p0($V %weight, ptr %from.2, i32 4, <$lanes x i1> %there.2)
  %k.2.next = add i64 %k.2, $lanes
  %k.2.more = icmp ult i64 %k.2.next, %keys
  br i1 %k.2.more, label %divide, label %row.end
""")
# The row's vector that begins at key k, and which of its lanes are keys: the last vector may reach beyond them.
_WHERE = """
  %from.{n} = getelementptr float, ptr %at, i64 %k.{n}
  %left.{n} = sub i64 %keys, %k.{n}
  %left.{n}.0 = insertelement <LANES x i64> poison, i64 %left.{n}, i32 0
  %left.{n}.each = shufflevector <LANES x i64> %left.{n}.0, <LANES x i64> poison, <LANES x i32> zeroinitializer
  %there.{n} = icmp ult <LANES x i64> <NUMBERS>, %left.{n}.each
"""


def _weighed(loop: Callable, scores: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    batch, heads, queries, keys = scores.shape
    loop(scores.data_ptr(), mask.data_ptr(), keys, scaling, heads, queries, keys, batch * heads * queries,
         threads_for(scores))
    return scores


@lru_cache
def _loop(lanes: int) -> Callable | None:
    """The loop, if it gives PyTorch's bits here."""
    loop = shared(_rows(lanes, "work"))
    for keys in (lanes, 5 * lanes, 6 * lanes + 3):
        scores = 8 * torch.randn(2, 3, keys, keys, generator=torch.Generator().manual_seed(keys))
        mask = torch.ones(2, 1, keys, keys, dtype=torch.bool).triu(1)
        right = masked_softmax_by_torch(scores, mask, 0.3)
        if not torch.equal(_weighed(loop, scores, mask, 0.3), right):
            return None
    return loop


def softmax_rows(name: str) -> str | None:
    """The loop as a function of this name for others to call: of ``ptr scores, ptr mask``, the bytes from row to row of
    the mask, ``float scaling, i64 heads, i64 queries, i64 keys``, its first row, and the one behind its last. None
    where there is none."""
    lanes = torchs_lanes()
    return None if lanes is None or _loop(lanes) is None else _rows(lanes, name)


@lru_cache
def torchs_lanes() -> int | None:
    """Numbers in PyTorch's vectors, if this processor has the instructions for such loops."""
    lanes = _LANES.get(torch.backends.cpu.get_cpu_capability())
    return lanes if lanes and has("avx2" if lanes == 8 else "avx512bw") and has("fma") else None


def _rows(lanes: int, name: str) -> str:
    kind = {"V": f"<{lanes} x float>", "lanes": lanes}
    where = _WHERE.replace("LANES", str(lanes)).replace("NUMBERS", ", ".join(f"i64 {n}" for n in range(lanes)))
    row = _ROW.substitute(
        kind, exp=exponential("%x", lanes),
        largest_of_all=largest_of_all("%larger", lanes), sum_of_all=sum_of_all("%sum.next", lanes),
        **{f"where_{n}": where.format(n=n) for n in range(3)})
    return row_by_row(_ARGUMENTS, row, declared(lanes) + _DECLARED.substitute(kind), name)


def largest_of_all(vector: str, lanes: int) -> str:
    """Lines after which ``VECTOR.all`` holds, in every lane, the largest number of ``vector``; NaN only if all are."""
    return _all(vector, lanes, "{more} = fcmp ogt {V} {a}, {b}\n"
                               "{name} = select <{lanes} x i1> {more}, {V} {a}, {V} {b}")


def sum_of_all(vector: str, lanes: int) -> str:
    """Lines after which every lane of ``VECTOR.all`` holds the sum of ``vector``'s numbers, with PyTorch's bits."""
    return _all(vector, lanes, "{name} = fadd {V} {a}, {b}")


def _all(vector: str, lanes: int, combine: str) -> str:
    """Lines that combine the lanes of ``vector`` as PyTorch does, each with the one half a vector away, a quarter,
    and so on; ``VECTOR.all`` holds the outcome in every lane."""
    lines, kind, now, apart = [], f"<{lanes} x float>", vector, lanes // 2
    while apart:
        other = f"{vector}.from.{apart}"
        places = ", ".join(f"i32 {lane ^ apart}" for lane in range(lanes))
        lines.append(f"{other} = shufflevector {kind} {now}, {kind} poison, <{lanes} x i32> <{places}>")
        name = f"{vector}.{apart}" if apart > 1 else f"{vector}.all"
        lines.append(combine.format(name=name, more=f"{name}.is", V=kind, lanes=lanes, a=now, b=other))
        now, apart = name, apart // 2
    return "\n".join(lines)
