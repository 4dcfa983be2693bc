"""A norm and a rotation, each in one pass over memory, with PyTorch's bits.

PyTorch takes eight calls for an RMSNorm and a dozen for a rotation. Between products that stream all weights through
the processor's caches, each of those finds its own instructions gone, and takes twice the time that it takes alone.
(Bfloat16's numbers below 1.2e-38, which lack digits, may become 0.)
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch
from torch.nn import functional as F

from tplab.kernels.compiled import NUMBERS, each, has, row_by_row, shared, threads_for

_GROUP = 32  # numbers that the norm takes at once
_TURNED = 16  # pairs of numbers that the rotation takes at once


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """``weight * x / rms(x)`` over the last dimension, with the bits of :func:`rms_norm_by_torch`.

    ``x`` is ``[..., size]`` in float32 or bfloat16, ``weight`` ``[size]`` in the same dtype. None where there is no
    such loop: for other dtypes and sizes, where PyTorch adds up in another order, and where a gradient is wanted.
    """
    if x.requires_grad or weight.requires_grad or x.dtype != weight.dtype or x.stride(-1) != 1:
        return None
    loop = _norm(x.dtype, x.shape[-1])
    return None if loop is None else _normed(loop, x.contiguous(), weight, eps)


def rms_norm_by_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The statistics in float32, cast where Hugging Face casts."""
    return weight * F.rms_norm(x.to(torch.float32), weight.shape, None, eps).to(x.dtype)


def rotate_half(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What Hugging Face's ``apply_rotary_pos_emb`` gives for q and k ``[1, heads, tokens, head_dim]``, cos and sin
    ``[1, tokens, head_dim]``: ``x * cos + cat(-x[half:], x[:half]) * sin``, each step rounded to their dtype.

    The new q and k lie in memory as ``[tokens, heads, head_dim]``. None where there is no such loop.
    """
    if not q.ndim == k.ndim == 4 or not q.dtype == k.dtype == cos.dtype == sin.dtype:
        return None
    (*_, tokens, size), (of_q, of_k, of_cos, of_sin) = q.shape, (x.stride() for x in (q, k, cos, sin))
    if q.shape[0] != 1 or k.shape[::2] != (1, tokens) or k.shape[3] != size or q.requires_grad or k.requires_grad or (
            not cos.shape == sin.shape == (1, tokens, size) or not of_q[3] == of_k[3] == of_cos[2] == of_sin[2] == 1):
        return None
    loop = _rotation(q.dtype, size)
    if loop is None:
        return None
    item, heads = q.itemsize, (q.shape[1], k.shape[1])
    turned = [x.new_empty_strided(x.shape, (x.numel(), size, count * size, 1)) for x, count in zip((q, k), heads)]
    loop(cos.data_ptr(), of_cos[1] * item, sin.data_ptr(), of_sin[1] * item,
         q.data_ptr(), of_q[2] * item, of_q[1] * item, turned[0].data_ptr(), heads[0],
         k.data_ptr(), of_k[2] * item, of_k[1] * item, turned[1].data_ptr(), heads[1], tokens, threads_for(q))
    return tuple(turned)


_NORM = Template("""
  %x.at = getelementptr [$size x $T], ptr %x, i64 %r
  %y.at = getelementptr [$size x $T], ptr %y, i64 %r
  $squares
  %mean = fdiv float $sum, $size.0
  %above = fadd float %mean, %eps
  %rms = call float @llvm.sqrt.f32(float %above)
  %scale = fdiv float 1.0, %rms
  %scale.first = insertelement <32 x float> poison, float %scale, i32 0
  %scale.each = shufflevector <32 x float> %scale.first, <32 x float> poison, <32 x i32> zeroinitializer
  br label %group

group:
  %g = phi i64 [0, %row], [%g.next, %group]
  %from = getelementptr <32 x $T>, ptr %x.at, i64 %g
  %by = getelementptr <32 x $T>, ptr %weight, i64 %g
  %to = getelementptr <32 x $T>, ptr %y.at, i64 %g
  %numbers = load <32 x $T>, ptr %from, align 2
  %wide = $widen <32 x $T> %numbers to <32 x float>
  %normed = fmul <32 x float> %wide, %scale.each
  %cast = $round <32 x float> %normed to <32 x $T>
  %factors = load <32 x $T>, ptr %by, align 2
  %weighted = fmul <32 x $T> %factors, %cast
  store <32 x $T> %weighted, ptr %to, align 2
  %g.next = add i64 %g, 1
  %g.more = icmp ult i64 %g.next, $groups
  br i1 %g.more, label %group, label %row.end
""")


def _normed(loop: Callable, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    loop(x.data_ptr(), weight.data_ptr(), y.data_ptr(), eps, x.numel() // x.shape[-1], threads_for(x))
    return y


@lru_cache
def _norm(dtype: torch.dtype, size: int) -> Callable | None:
    """The loop, if it gives PyTorch's bits here: numbers are tried in which another order shows."""
    if dtype not in NUMBERS or not size or size % _GROUP or not has("avx2"):
        return None
    lines, total = _sum_of_squares(size // _GROUP)
    numbers = NUMBERS[dtype]
    row = _NORM.substitute(numbers, size=size, groups=size // _GROUP, sum=total,
                           squares=Template(lines).substitute(numbers))
    loop = shared(row_by_row("ptr %x, ptr %weight, ptr %y, float %eps", row, "declare float @llvm.sqrt.f32(float)"))
    x, weight = torch.randn(51, size, generator=torch.Generator().manual_seed(size)).to(dtype).split([50, 1])
    return loop if torch.equal(_normed(loop, x, weight[0], 1e-6), rms_norm_by_torch(x, weight[0], 1e-6)) else None


def _sum_of_squares(groups: int) -> tuple[str, str]:
    """Lines that add up the squares of so many groups of 32 numbers behind ``%x.at``, and the sum's name.

    As ``torch.mean`` adds (``aten/src/ATen/native/cpu/SumKernel.cpp``): four vectors of eight numbers side by side;
    after every 16 additions a sum is added to the next level's, and begins anew.
    """
    lines, names = [], (f"%sum.{n}" for n in range(1 << 30))

    def add(a: str | None, b: str | None, kind: str = "<32 x float>") -> str | None:
        if a is None or b is None:
            return b or a
        lines.append(f"{(name := next(names))} = fadd {kind} {a}, {b}")
        return name

    levels = [None] * 4
    for n in range(groups):
        lines += [f"%at.{n} = getelementptr <32 x $T>, ptr %x.at, i64 {n}",
                  f"%stored.{n} = load <32 x $T>, ptr %at.{n}, align 2",
                  f"%x.{n} = $widen <32 x $T> %stored.{n} to <32 x float>",
                  f"%square.{n} = fmul <32 x float> %x.{n}, %x.{n}"]
        levels[0] = add(levels[0], f"%square.{n}")
        for level in range(3):
            if (n + 1) % 16 ** (level + 1) == 0:
                levels[level:level + 2] = None, add(levels[level + 1], levels[level])
    side_by_side = vector = total = None
    for level in levels:
        side_by_side = add(side_by_side, level)
    for n in range(4):
        places = ", ".join(f"i32 {8 * n + lane}" for lane in range(8))
        lines.append(f"%vector.{n} = shufflevector <32 x float> {side_by_side}, <32 x float> poison, "
                     f"<8 x i32> <{places}>")
        vector = add(vector, f"%vector.{n}", "<8 x float>")
    for lane in range(8):
        lines.append(f"%lane.{lane} = extractelement <8 x float> {vector}, i32 {lane}")
        total = add(total, f"%lane.{lane}", "float")
    return "\n".join(lines), total


# Of q and of k: numbers 0 and 1.
_ROTATION_TAKES = "ptr %cos, i64 %cos.token, ptr %sin, i64 %sin.token, " + ", ".join(
    f"ptr %x.{n}, i64 %x.token.{n}, i64 %x.head.{n}, ptr %y.{n}, i64 %heads.{n}" for n in range(2))
_ROTATION = each("""
  %cos.offset = mul i64 %r, %cos.token
  %cos.at = getelementptr i8, ptr %cos, i64 %cos.offset
  %sin.offset = mul i64 %r, %sin.token
  %sin.at = getelementptr i8, ptr %sin, i64 %sin.offset
  %x.offset.{n} = mul i64 %r, %x.token.{n}
  %x.at.{n} = getelementptr i8, ptr %x.{n}, i64 %x.offset.{n}
  %y.offset.{n} = mul i64 %r, %heads.{n}
  %y.at.{n} = getelementptr [2 x [$half x $T]], ptr %y.{n}, i64 %y.offset.{n}
  call void @turn(ptr %x.at.{n}, i64 %x.head.{n}, ptr %cos.at, ptr %sin.at, ptr %y.at.{n}, i64 %heads.{n})
  br label %row.end
""", n=2)
_TURN_HEADS = """
define internal void @turn(ptr %x, i64 %x.head, ptr %cos.at, ptr %sin.at, ptr %y, i64 %heads) {
begin:
  br label %next

next:
  %h = phi i64 [0, %begin], [%h.next, %head]
  %more = icmp ult i64 %h, %heads
  br i1 %more, label %head, label %done

head:
  %head.offset = mul i64 %h, %x.head
  %x.at = getelementptr i8, ptr %x, i64 %head.offset
  %y.at = getelementptr [2 x [$half x $T]], ptr %y, i64 %h
  $both_halves
  %h.next = add i64 %h, 1
  br label %next

done:
  ret void
}
"""
# For each half of a head, and each vector in it: LLVM rounds what it computes in bfloat.
_READ = """
  %x.{half}.begin = getelementptr [$half x $T], ptr %x.at, i64 {half}
  %x.{half}.{n}.at = getelementptr <16 x $T>, ptr %x.{half}.begin, i64 {n}
  %x.{half}.{n} = load <16 x $T>, ptr %x.{half}.{n}.at, align 2
  %cos.{half}.begin = getelementptr [$half x $T], ptr %cos.at, i64 {half}
  %cos.{half}.{n}.at = getelementptr <16 x $T>, ptr %cos.{half}.begin, i64 {n}
  %cos.{half}.{n} = load <16 x $T>, ptr %cos.{half}.{n}.at, align 2
  %sin.{half}.begin = getelementptr [$half x $T], ptr %sin.at, i64 {half}
  %sin.{half}.{n}.at = getelementptr <16 x $T>, ptr %sin.{half}.begin, i64 {n}
  %sin.{half}.{n} = load <16 x $T>, ptr %sin.{half}.{n}.at, align 2
"""
_TURN = """
  %other.0.{n} = fneg <16 x $T> %x.1.{n}
  %other.1.{n} = bitcast <16 x $T> %x.0.{n} to <16 x $T>
  %own.{half}.{n} = fmul <16 x $T> %x.{half}.{n}, %cos.{half}.{n}
  %cross.{half}.{n} = fmul <16 x $T> %other.{half}.{n}, %sin.{half}.{n}
  %new.{half}.{n} = fadd <16 x $T> %own.{half}.{n}, %cross.{half}.{n}
  %y.{half}.begin = getelementptr [$half x $T], ptr %y.at, i64 {half}
  %y.{half}.{n}.at = getelementptr <16 x $T>, ptr %y.{half}.begin, i64 {n}
  store <16 x $T> %new.{half}.{n}, ptr %y.{half}.{n}.at, align 2
"""


@lru_cache
def _rotation(dtype: torch.dtype, size: int) -> Callable | None:
    if dtype not in NUMBERS or not size or size % (2 * _TURNED) or not has("avx2"):
        return None
    holes = {"T": NUMBERS[dtype]["T"], "half": size // 2}
    both_halves = each(Template(_READ + _TURN).substitute(holes), half=2, n=size // 2 // _TURNED)
    turn = Template(_TURN_HEADS).substitute(holes, both_halves=both_halves)
    return shared(row_by_row(_ROTATION_TAKES, Template(_ROTATION).substitute(holes), turn))
