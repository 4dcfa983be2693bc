"""One piece of an all-reduce as one function in LLVM's language: between two products, each of Python's calls counts.

It does what :class:`tplab.pool.shared_memory.SharedMemoryGroup` does call by call, as long as nothing out of the
ordinary happens. If it does, it says what, and everything can still be done call by call.
"""

import platform
from functools import lru_cache
from string import Template

import torch

from tplab.kernels.compiled import NUMBERS, Compiled, compiled
from tplab.ranks.oplog import ENTERED, LEFT, RECORD_BYTES, RECORDS, RING_AT, SAME_FROM, SAME_TO, STATE_AT

DONE, ASLEEP, LATE, UNLIKE = range(4)  # added up; somebody sleeps; somebody is not there yet; not all do the same
LANES = 16  # a piece's numbers are a multiple of so many


@lru_cache
def adding(dtype: torch.dtype) -> Compiled | None:
    """The function for ``dtype``, if there is one.

    It takes

    * a piece, and how many numbers it has;
    * for each rank the addresses of its first slot, of its words ``STEP`` and ``ASLEEP``, and of its log; how many
      ranks there are, and which this is;
    * how far behind its first slot this step's begins, and how far behind its log's begin the record;
    * the step, how often to look whether the others are there, and the address where to say what came of it.
    """
    return None if dtype not in NUMBERS else compiled(_text(dtype))


@lru_cache
def noted_reduce(dtype: torch.dtype) -> Compiled | None:
    """A whole all-reduce of one piece, to be repeated from a graph (:mod:`tplab.kernels.graph`), log and all.

    It takes what :func:`adding` takes, up to which rank this is; how far the second slots are behind the first ones;
    the address of three words: the numbers of the last step and of the last collective, which it counts up, and how
    often to look; of the record that is to stand in the log, and of the log; and where to say what came of it.
    """
    if dtype not in NUMBERS:
        return None
    inner = _text(dtype).replace("define void @add_up", "define internal void @add_up")
    return compiled(inner + _NOTED.substitute(
        ring_at=RING_AT, records=RECORDS, bytes=RECORD_BYTES, state_at=STATE_AT, entered=ENTERED, left=LEFT, done=DONE))


def _text(dtype: torch.dtype) -> str:
    pauses = platform.machine() in ("x86_64", "AMD64")
    pause = "call void @llvm.x86.sse2.pause()"
    return _TEXT.substitute(
        T=NUMBERS[dtype]["T"], V=f"<{LANES} x {NUMBERS[dtype]['T']}>", lanes=LANES, size=dtype.itemsize,
        same_from=SAME_FROM, words=(SAME_TO - SAME_FROM) // 8, pause=pause if pauses else "",
        declared=pause.replace("call", "declare") if pauses else "", done=DONE, asleep=ASLEEP, late=LATE,
        unlike=UNLIKE)


_TEXT = Template("""
$declared
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @add_up(ptr %piece, i64 %n, ptr %peers, i64 %ranks, i64 %rank, i64 %slot.offset, i64 %record.offset,
                    i64 %step, i64 %looks, ptr %said) {
begin:
  %own = getelementptr [4 x ptr], ptr %peers, i64 %rank
  %own.step.at = getelementptr ptr, ptr %own, i64 1
  %own.log.at = getelementptr ptr, ptr %own, i64 3
  %own.slots = load ptr, ptr %own
  %own.step = load ptr, ptr %own.step.at
  %own.log = load ptr, ptr %own.log.at
  %own.slot = getelementptr i8, ptr %own.slots, i64 %slot.offset
  %bytes = mul i64 %n, $size
  call void @llvm.memcpy.p0.p0.i64(ptr %own.slot, ptr %piece, i64 %bytes, i1 false)
  store atomic i64 %step, ptr %own.step release, align 8
  fence seq_cst
  br label %awake

awake:
  %r.0 = phi i64 [0, %begin], [%r.0.next, %awake.next]
  %peer.0 = getelementptr [4 x ptr], ptr %peers, i64 %r.0
  %asleep.at = getelementptr ptr, ptr %peer.0, i64 2
  %asleep.word = load ptr, ptr %asleep.at
  %asleep = load atomic i64, ptr %asleep.word monotonic, align 8
  %sleeps = icmp ne i64 %asleep, 0
  br i1 %sleeps, label %somebody.sleeps, label %awake.next

awake.next:
  %r.0.next = add i64 %r.0, 1
  %r.0.more = icmp ult i64 %r.0.next, %ranks
  br i1 %r.0.more, label %awake, label %meet

meet:
  %r.1 = phi i64 [0, %awake.next], [%r.1.next, %there]
  %left.0 = phi i64 [%looks, %awake.next], [%left, %there]
  %peer.1 = getelementptr [4 x ptr], ptr %peers, i64 %r.1
  %step.at = getelementptr ptr, ptr %peer.1, i64 1
  %step.word = load ptr, ptr %step.at
  %record.at = getelementptr ptr, ptr %peer.1, i64 3
  %log = load ptr, ptr %record.at
  br label %look

look:
  %left = phi i64 [%left.0, %meet], [%left.less, %again]
  %published = load atomic i64, ptr %step.word acquire, align 8
  %late = icmp slt i64 %published, %step
  br i1 %late, label %wait, label %compare

wait:
  %left.less = sub i64 %left, 1
  %patient = icmp sgt i64 %left.less, 0
  br i1 %patient, label %again, label %somebody.is.late

again:
  $pause
  br label %look

compare:
  %word = phi i64 [0, %look], [%word.next, %same]
  %word.from = mul i64 %word, 8
  %word.in = add i64 %word.from, $same_from
  %word.offset = add i64 %word.in, %record.offset
  %mine.at = getelementptr i8, ptr %own.log, i64 %word.offset
  %theirs.at = getelementptr i8, ptr %log, i64 %word.offset
  %mine = load i64, ptr %mine.at, align 1
  %theirs = load i64, ptr %theirs.at, align 1
  %alike = icmp eq i64 %mine, %theirs
  br i1 %alike, label %same, label %they.differ

same:
  %word.next = add i64 %word, 1
  %word.more = icmp ult i64 %word.next, $words
  br i1 %word.more, label %compare, label %there

there:
  %r.1.next = add i64 %r.1, 1
  %r.1.more = icmp ult i64 %r.1.next, %ranks
  br i1 %r.1.more, label %meet, label %some

some:
  %i = phi i64 [0, %there], [%i.next, %sum.end]
  %from = mul i64 %i, $size
  %offset = add i64 %from, %slot.offset
  %first.slots = load ptr, ptr %peers
  %first.at = getelementptr i8, ptr %first.slots, i64 %offset
  %first = load $V, ptr %first.at, align 2
  br label %sum

sum:
  %r.2 = phi i64 [1, %some], [%r.2.next, %sum]
  %sum.so.far = phi $V [%first, %some], [%sum.now, %sum]
  %peer.2 = getelementptr [4 x ptr], ptr %peers, i64 %r.2
  %slots = load ptr, ptr %peer.2
  %at = getelementptr i8, ptr %slots, i64 %offset
  %numbers = load $V, ptr %at, align 2
  %sum.now = fadd $V %sum.so.far, %numbers
  %r.2.next = add i64 %r.2, 1
  %r.2.more = icmp ult i64 %r.2.next, %ranks
  br i1 %r.2.more, label %sum, label %sum.end

sum.end:
  %to = getelementptr i8, ptr %piece, i64 %from
  store $V %sum.now, ptr %to, align 2
  %i.next = add i64 %i, $lanes
  %i.more = icmp ult i64 %i.next, %n
  br i1 %i.more, label %some, label %end

end:
  store i64 $done, ptr %said
  ret void

somebody.sleeps:
  store i64 $asleep, ptr %said
  ret void

somebody.is.late:
  store i64 $late, ptr %said
  ret void

they.differ:
  store i64 $unlike, ptr %said
  ret void
}
""")

# A record's number is 0 while it is written, so that nobody reads half of it.
_NOTED = Template("""
define void @all_reduce(ptr %piece, i64 %n, ptr %peers, i64 %ranks, i64 %rank, i64 %second.slot, ptr %counted,
                        ptr %template, ptr %log, ptr %said) {
begin:
  %looks.at = getelementptr i64, ptr %counted, i64 2
  %looks = load i64, ptr %looks.at
  %seq.at = getelementptr i64, ptr %counted, i64 1
  %seq.last = load i64, ptr %seq.at
  %seq = add i64 %seq.last, 1
  store i64 %seq, ptr %seq.at
  %index = urem i64 %seq, $records
  %in.ring = mul i64 %index, $bytes
  %record.offset = add i64 %in.ring, $ring_at
  %record = getelementptr i8, ptr %log, i64 %record.offset
  store atomic i64 0, ptr %record release, align 8
  fence seq_cst
  %behind.number = getelementptr i8, ptr %record, i64 8
  %given = getelementptr i8, ptr %template, i64 8
  call void @llvm.memcpy.p0.p0.i64(ptr %behind.number, ptr %given, i64 sub (i64 $bytes, i64 8), i1 false)
  %state = getelementptr i8, ptr %record, i64 $state_at
  store i8 $entered, ptr %state
  store atomic i64 %seq, ptr %record release, align 8
  store atomic i64 %seq, ptr %log release, align 8
  %alone = icmp eq i64 %ranks, 1
  br i1 %alone, label %leave, label %meet

meet:
  %step.last = load i64, ptr %counted
  %step = add i64 %step.last, 1
  store i64 %step, ptr %counted
  %parity = and i64 %step, 1
  %slot.offset = mul i64 %parity, %second.slot
  call void @add_up(ptr %piece, i64 %n, ptr %peers, i64 %ranks, i64 %rank, i64 %slot.offset, i64 %record.offset,
                    i64 %step, i64 %looks, ptr %said)
  %what = load i64, ptr %said
  %is.done = icmp eq i64 %what, $done
  br i1 %is.done, label %leave, label %end

leave:
  store i8 $left, ptr %state
  br label %end

end:
  ret void
}
""")
