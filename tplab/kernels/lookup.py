"""Rows of a packed weight, which an embedding looks up: a tied LM head is packed as its product wants it.

A row's numbers lie apart there, one in each line of memory. Gathered by PyTorch's index, 16 rows of SmolLM2 take one of
two ranks 0.09 ms between two steps, and a prompt's 512 rows 2 ms and more.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

from tplab.kernels.compiled import row_by_row, shared, threads_for

WORD = 4  # bytes: a number in float32, two in bfloat16


class Lookup:
    """Where the rows of a weight are.

    Args:
        starts: ``[rows, blocks]`` addresses of each row's first word in each block of inputs.
        steps: ``[rows]`` bytes from word to word.
        counts: words in each block.
    """

    def __init__(self, starts: torch.Tensor, steps: torch.Tensor, counts: list[int]):
        self.starts, self.steps, self.counts = starts.contiguous(), steps.contiguous(), torch.tensor(counts)
        self.words = sum(counts)

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[*indices, numbers in all words]``. Raises IndexError for a row that is not there."""
        wanted, wrong = indices.long().contiguous(), ctypes.c_int64()
        found = torch.empty(*indices.shape, self.words * WORD // dtype.itemsize, dtype=dtype)
        _look_up()(wanted.data_ptr(), self.starts.data_ptr(), self.steps.data_ptr(), len(self.steps),
                   self.counts.data_ptr(), len(self.counts), found.data_ptr(), self.words, ctypes.addressof(wrong),
                   wanted.numel(), threads_for(found))
        if wrong.value:
            raise IndexError(f"a row is looked up that is not one of {len(self.steps)}: {indices.tolist()}")
        return found


_ROW = """
  %index.at = getelementptr i64, ptr %indices, i64 %r
  %index = load i64, ptr %index.at
  %is.there = icmp ult i64 %index, %rows
  br i1 %is.there, label %found, label %missing

missing:
  store i64 1, ptr %wrong
  br label %row.end

found:
  %step.at = getelementptr i64, ptr %steps, i64 %index
  %step = load i64, ptr %step.at
  %starts.before = mul i64 %index, %blocks
  %starts.at = getelementptr ptr, ptr %starts, i64 %starts.before
  %words.before = mul i64 %r, %words
  %y.row = getelementptr i32, ptr %y, i64 %words.before
  br label %block

block:
  %b = phi i64 [0, %found], [%b.next, %block.end]
  %y.at = phi ptr [%y.row, %found], [%y.next, %block.end]
  %start.at = getelementptr ptr, ptr %starts.at, i64 %b
  %start = load ptr, ptr %start.at
  %count.at = getelementptr i64, ptr %counts, i64 %b
  %count = load i64, ptr %count.at
  br label %word

word:
  %k = phi i64 [0, %block], [%k.next, %word]
  %offset = mul i64 %k, %step
  %from = getelementptr i8, ptr %start, i64 %offset
  %number = load i32, ptr %from
  %to = getelementptr i32, ptr %y.at, i64 %k
  store i32 %number, ptr %to
  %k.next = add i64 %k, 1
  %k.more = icmp ult i64 %k.next, %count
  br i1 %k.more, label %word, label %block.end

block.end:
  %y.next = getelementptr i32, ptr %y.at, i64 %count
  %b.next = add i64 %b, 1
  %b.more = icmp ult i64 %b.next, %blocks
  br i1 %b.more, label %block, label %row.end
"""


@lru_cache
def _look_up() -> Callable:
    return shared(row_by_row("ptr %indices, ptr %starts, ptr %steps, i64 %rows, ptr %counts, i64 %blocks, ptr %y, "
                             "i64 %words, ptr %wrong", _ROW))
