"""The loop of :mod:`tplab.kernels.paged_attention`, in LLVM's language: a function of

* ``q`` and ``y``: ``[batch, heads, head_dim]``, the queries, and what is attended to;
* ``k`` and ``v``: a cache's keys and values, ``[num_slots, heads of the cache, head_dim]``;
* ``mask`` ``[batch, keys]`` and ``scaling``, as in :mod:`tplab.kernels.softmax`;
* ``slots`` ``[batch, keys]`` and ``lengths`` ``[batch]``;
* how many heads the cache has, which of them is the first that is meant, how many are, and how many keys there are;
* how many heads of sequences there are, and how many threads share them.
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch

from tplab.kernels.compiled import NUMBERS, each, has, row_by_row, shared
from tplab.kernels.softmax import softmax_rows

PORTION = 384  # keys that MKL adds up in one go; half of them, if there are more than that, but not more than twice
_MOST_SUMS = 24 if has("avx512f") else 8  # vectors that (almost) stay in registers: AVX2 has 16 of half the size


@lru_cache
def paged_loop(dtype: torch.dtype, head_dim: int, group: int, chains: int = 1) -> Callable | None:
    """The loop where ``group`` queries share a KV head; None where there is none.

    A score is added up in so many ``chains``, 1, 2, 4 or 8, which are added in the end: more are more exact.
    """
    blocks = [block for block in (64, 32, 16) if head_dim % block == 0 and group * block <= 16 * _MOST_SUMS]
    if dtype not in NUMBERS or not blocks or not has("avx2") or (softmax := softmax_rows("softmax")) is None:
        return None
    kind = NUMBERS[dtype]
    texts = {"size": head_dim, "group": group, "T": kind["T"], "block": blocks[0], "portion": PORTION,
             "twice": 2 * PORTION,
             "next_queries": "\n".join(_NEXT_QUERY.format(query=query, next=query + 1) for query in range(group - 1))}

    def lines(text: str, **counts: int) -> str:
        return Template(each(text, **counts)).substitute(kind, V="<16 x float>", size=head_dim)

    def ask(keys: int) -> str:
        return Template(_ASK).substitute(ahead=_AHEAD) + lines(
            _ASK_FOR, asked=keys, line=head_dim * dtype.itemsize // 64 or 1)

    counts = {"query": group, "vector": blocks[0] // 16}
    scores = _SCORES.substitute(
        texts, ask=ask(16), addresses=lines(_ADDRESS, key=16), sums=_scores_so_far(group, chains),
        numbers=lines(_READ_KEY, key=16) + laid_across() + lines(_READ_QUERY, query=group, n=16)
        + _added_in_order(group, chains), stores=_chains_added(group, chains) + lines(_STORE_SCORE, query=group))
    values = _VALUES.substitute(
        texts, ask=ask(1), totals=lines(_TOTAL, **counts), sums=lines(_SUM, **counts), add=lines(_ADD, **counts),
        keep=lines(_KEEP, **counts), stores=lines(_STORE_VALUE, **counts))
    parts = [_PREFETCH, softmax, scores, values, Template(_ONE).substitute(texts)]
    return shared("\n".join([*parts, row_by_row(_ARGUMENTS, _ROW, "" if _FMA in softmax else _FMA)]))


def laid_across() -> str:
    """Lines after which ``%across.1.N`` holds number N of each of sixteen keys: first halves change places, then
    quarters, and so on."""
    lines = []
    for apart in (8, 4, 2, 1):
        for upper in (n for n in range(16) if not n & apart):
            pair = f"<16 x float> %across.{2 * apart}.{upper}, <16 x float> %across.{2 * apart}.{upper + apart}"
            for number, away in ((upper, 0), (upper + apart, apart)):
                places = (lane ^ away if not lane & apart else 16 + (lane ^ apart ^ away) for lane in range(16))
                lines.append(f"%across.{apart}.{number} = shufflevector {pair}, "
                             f"<16 x i32> <{', '.join(f'i32 {place}' for place in places)}>")
    return "\n".join(lines) + "\n"


def _scores_so_far(group: int, chains: int) -> str:
    return "\n".join(f"%chain.{query}.{n} = phi <16 x float> [zeroinitializer, %sixteen], "
                     f"[%score.{query}.{16 - chains + n}, %numbers]" for query in range(group) for n in range(chains))


def _added_in_order(group: int, chains: int) -> str:
    """Number n of a query and of its keys, added to chain n of so many."""
    lines = []
    for n in range(16):
        for query in range(group):
            before = f"%score.{query}.{n - chains}" if n >= chains else f"%chain.{query}.{n}"
            lines.append(f"%score.{query}.{n} = call <16 x float> @llvm.fma.v16f32("
                         f"<16 x float> %q.{query}.{n}.all, <16 x float> %across.1.{n}, <16 x float> {before})")
    return "\n".join(lines)


def _chains_added(group: int, chains: int) -> str:
    """``%whole.QUERY``: neighbours first."""
    lines = []
    for query in range(group):
        sums = [f"%score.{query}.{n}" for n in range(16 - chains, 16)]
        while len(sums) > 1:
            pairs = list(zip(sums[::2], sums[1::2]))
            sums = [f"%sum.{query}.{len(pairs)}.{n}" for n in range(len(pairs))]
            lines += [f"{name} = fadd <16 x float> {one}, {other}" for name, (one, other) in zip(sums, pairs)]
        lines.append(f"%whole.{query} = bitcast <16 x float> {sums[0]} to <16 x float>\n")
    return "\n".join(lines)


# A row is one KV head of one sequence, with all the queries of its group.
_ARGUMENTS = ("ptr %q, ptr %k, ptr %v, ptr %y, ptr %mask, float %scaling, ptr %slots, ptr %lengths, i64 %heads, "
              "i64 %head.first, i64 %heads.meant, i64 %keys")
_ROW = f"call void @one({_ARGUMENTS}, i64 %r, i64 %end)\nbr label %row.end\n"
# Its weights are on the stack until it is done.
_ONE = f"""
define internal void @one({_ARGUMENTS}, i64 %r, i64 %rows) {{
  %sequence = udiv i64 %r, %heads.meant
  %head.number = urem i64 %r, %heads.meant
  %head = add i64 %head.first, %head.number
  %length.at = getelementptr i64, ptr %lengths, i64 %sequence
  %length = load i64, ptr %length.at
  %sequence.offset = mul i64 %sequence, %keys
  %slots.row = getelementptr i64, ptr %slots, i64 %sequence.offset
  %mask.row = getelementptr i8, ptr %mask, i64 %sequence.offset
  %q.row = getelementptr [$group x [$size x $T]], ptr %q, i64 %r
  %y.row = getelementptr [$group x [$size x $T]], ptr %y, i64 %r
  %length.up = add i64 %length, 15
  %filled = and i64 %length.up, -16
  %following = add i64 %r, 1
  %is.last = icmp uge i64 %following, %rows
  %next = select i1 %is.last, i64 %r, i64 %following
  %next.sequence = udiv i64 %next, %heads.meant
  %next.number = urem i64 %next, %heads.meant
  %next.head = add i64 %head.first, %next.number
  %next.offset = mul i64 %next.sequence, %keys
  %next.slots = getelementptr i64, ptr %slots, i64 %next.offset
  %count = mul i64 %filled, $group
  %weights = alloca float, i64 %count, align 64
  call void @scores(ptr %q.row, ptr %k, ptr %weights, ptr %slots.row, i64 %length, i64 %heads, i64 %head, i64 %filled,
                    ptr %v, ptr %slots.row, i64 %head, i64 %keys)
  call void @softmax(ptr %weights, ptr %mask.row, i64 0, float %scaling, i64 $group, i64 1, i64 %filled, i64 0,
                     i64 $group)
  call void @values(ptr %y.row, ptr %v, ptr %weights, ptr %slots.row, i64 %length, i64 %heads, i64 %head, i64 %filled,
                    ptr %k, ptr %next.slots, i64 %next.head, i64 %keys)
  ret void
}}
"""
_NEXT_QUERY = "  %weights.row.{next} = getelementptr float, ptr %weights.row.{query}, i64 %keys\n"
_TAKES = ("ptr %x.row, ptr %cache, ptr %weights.row.0, ptr %slots.row, i64 %length, i64 %heads, i64 %head, "
          "i64 %keys, ptr %cache.next, ptr %slots.next, i64 %head.next, i64 %all")
# Memory is asked for so many keys earlier: of this cache and head, or, behind their end, of what is read next.
_AHEAD = 32
_ASK = """
  %later = add i64 %k, $ahead
  %is.there = icmp ult i64 %later, %keys
  %behind = sub i64 %later, %keys
  %wanted = select i1 %is.there, i64 %later, i64 %behind
  %slots.asked = select i1 %is.there, ptr %slots.row, ptr %slots.next
  %cache.asked = select i1 %is.there, ptr %cache, ptr %cache.next
  %head.asked = select i1 %is.there, i64 %head, i64 %head.next
  %last.key = sub i64 %all, 1
"""
_ASK_FOR = """
  %asked.{asked} = add i64 %wanted, {asked}
  %inside.{asked} = icmp ult i64 %asked.{asked}, %last.key
  %valid.{asked} = select i1 %inside.{asked}, i64 %asked.{asked}, i64 %last.key
  %slot.asked.at.{asked} = getelementptr i64, ptr %slots.asked, i64 %valid.{asked}
  %slot.asked.{asked} = load i64, ptr %slot.asked.at.{asked}
  %place.asked.{asked} = mul i64 %slot.asked.{asked}, %heads
  %number.asked.{asked} = add i64 %place.asked.{asked}, %head.asked
  %vector.asked.{asked} = getelementptr [$size x $T], ptr %cache.asked, i64 %number.asked.{asked}
  %line.{asked}.{line} = getelementptr [64 x i8], ptr %vector.asked.{asked}, i64 {line}
  call void @llvm.prefetch.p0(ptr %line.{asked}.{line}, i32 0, i32 2, i32 1)
"""
# Sixteen keys at a time: of each sixteen numbers, which are then laid across, so that a vector holds one number of each
# key, and every score is added up in the order of the numbers: in one chain, as MKL does with AVX-512.
_SCORES = Template(f"define internal void @scores({_TAKES}) {{" + """
begin:
  $next_queries
  br label %sixteen

sixteen:
  %k = phi i64 [0, %begin], [%k.next, %sixteen.end]
  %slot.at = getelementptr i64, ptr %slots.row, i64 %k
  $ask
  $addresses
  br label %numbers

numbers:
  %d = phi i64 [0, %sixteen], [%d.next, %numbers]
  $sums
  $numbers
  %d.next = add i64 %d, 16
  %d.more = icmp ult i64 %d.next, $size
  br i1 %d.more, label %numbers, label %sixteen.end

sixteen.end:
  $stores
  %k.next = add i64 %k, 16
  %k.more = icmp ult i64 %k.next, %length
  br i1 %k.more, label %sixteen, label %done

done:
  ret void
}
""")
_ADDRESS = """
  %slot.at.{key} = getelementptr i64, ptr %slot.at, i64 {key}
  %slot.{key} = load i64, ptr %slot.at.{key}
  %place.{key} = mul i64 %slot.{key}, %heads
  %number.{key} = add i64 %place.{key}, %head
  %key.{key} = getelementptr [$size x $T], ptr %cache, i64 %number.{key}
"""
_READ_KEY = """
  %from.{key} = getelementptr $T, ptr %key.{key}, i64 %d
  %stored.{key} = load <16 x $T>, ptr %from.{key}, align 2
  %across.16.{key} = $widen <16 x $T> %stored.{key} to $V
"""
_READ_QUERY = """
  %q.at.{query} = getelementptr [$size x $T], ptr %x.row, i64 {query}, i64 %d
  %q.at.{query}.{n} = getelementptr $T, ptr %q.at.{query}, i64 {n}
  %q.stored.{query}.{n} = load $T, ptr %q.at.{query}.{n}
  %q.{query}.{n} = $widen $T %q.stored.{query}.{n} to float
  %q.{query}.{n}.0 = insertelement $V poison, float %q.{query}.{n}, i32 0
  %q.{query}.{n}.all = shufflevector $V %q.{query}.{n}.0, $V poison, <16 x i32> zeroinitializer
"""
# One number of one value at a time, for all queries of the group.
_VALUES = Template(f"define internal void @values({_TAKES}) {{" + """
begin:
  $next_queries
  %fit = icmp ule i64 %length, $portion
  %length.up = add i64 %length, 1
  %half = lshr i64 %length.up, 1
  %few = select i1 %fit, i64 %length, i64 %half
  %are.many = icmp ugt i64 %length, $twice
  %portion = select i1 %are.many, i64 $portion, i64 %few
  br label %block

block:
  %d = phi i64 [0, %begin], [%d.next, %block.end]
  br label %portion.begin

portion.begin:
  %portion.first = phi i64 [0, %block], [%last, %portion.end]
  $totals
  %last.whole = add i64 %portion.first, %portion
  %is.short = icmp ult i64 %length, %last.whole
  %last = select i1 %is.short, i64 %length, i64 %last.whole
  br label %key

key:
  %k = phi i64 [%portion.first, %portion.begin], [%k.next, %key]
  $sums
  $ask
  %slot.at = getelementptr i64, ptr %slots.row, i64 %k
  %slot = load i64, ptr %slot.at
  %place = mul i64 %slot, %heads
  %number = add i64 %place, %head
  %value = getelementptr [$size x $T], ptr %cache, i64 %number, i64 %d
  $add
  %k.next = add i64 %k, 1
  %k.more = icmp ult i64 %k.next, %last
  br i1 %k.more, label %key, label %portion.end

portion.end:
  $keep
  %portion.more = icmp ult i64 %last, %length
  br i1 %portion.more, label %portion.begin, label %block.end

block.end:
  $stores
  %d.next = add i64 %d, $block
  %d.more = icmp ult i64 %d.next, $size
  br i1 %d.more, label %block, label %done

done:
  ret void
}
""")
_SUM = """
  %sum.{query}.{vector} = phi $V [zeroinitializer, %portion.begin], [%sum.{query}.{vector}.next, %key]
"""
_ADD = """
  %value.{vector}.at = getelementptr <16 x $T>, ptr %value, i64 {vector}
  %stored.{vector} = load <16 x $T>, ptr %value.{vector}.at, align 2
  %value.{vector} = $widen <16 x $T> %stored.{vector} to $V
  %weight.at.{query} = getelementptr float, ptr %weights.row.{query}, i64 %k
  %weight.{query} = load float, ptr %weight.at.{query}
  %weight.{query}.0 = insertelement $V poison, float %weight.{query}, i32 0
  %w.{query} = shufflevector $V %weight.{query}.0, $V poison, <16 x i32> zeroinitializer
  %sum.{query}.{vector}.next = call $V @llvm.fma.v16f32($V %w.{query}, $V %value.{vector}, $V %sum.{query}.{vector})
"""
_TOTAL = """
  %total.{query}.{vector} = phi $V [zeroinitializer, %block], [%total.{query}.{vector}.next, %portion.end]
"""
_KEEP = """
  %total.{query}.{vector}.next = fadd $V %total.{query}.{vector}, %sum.{query}.{vector}.next
"""
_STORE_VALUE = """
  %x.at.{query} = getelementptr [$size x $T], ptr %x.row, i64 {query}, i64 %d
  %x.at.{query}.{vector} = getelementptr <16 x $T>, ptr %x.at.{query}, i64 {vector}
  %rounded.{query}.{vector} = $round $V %total.{query}.{vector}.next to <16 x $T>
  store <16 x $T> %rounded.{query}.{vector}, ptr %x.at.{query}.{vector}, align 2
"""
_STORE_SCORE = """
  %score.at.{query} = getelementptr float, ptr %weights.row.{query}, i64 %k
  store $V %whole.{query}, ptr %score.at.{query}, align 4
"""
_PREFETCH = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
_FMA = "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)"
