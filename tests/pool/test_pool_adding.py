"""An all-reduce in one call: the same bits as call by call, and whatever is out of the ordinary is left to Python."""

import ctypes

import numpy as np
import pytest
import torch

from tplab import RankPool
from tplab.pool import shared_memory
from tplab.pool.adding import ASLEEP, DONE, LATE, UNLIKE, adding
from tplab.pool.waiting import Looks
from tplab.ranks.errors import CollectiveMismatch

SLOT, RECORD, SAME_FROM, SAME_TO = 4096, 256, 24, 104
STEP = 7


class Peers:
    """Slots, words and records of some ranks, where all others have published ``STEP`` and rank 1 is this one."""

    def __init__(self, parts, offset=0):
        self.size, self.offset = len(parts), offset
        self.slots = [torch.zeros(2 * SLOT, dtype=torch.uint8) for _ in parts]
        self.words = np.array([[STEP, 0]] * self.size)
        self.logs = np.random.default_rng(0).integers(0, 256, 1024, np.uint8)[None].repeat(self.size, 0)
        self.logs[:, :RECORD + SAME_FROM] = self.logs[:, RECORD + SAME_TO:] = np.arange(self.size)[:, None]
        for slot, part in zip(self.slots, parts):
            flat = part.reshape(-1).view(torch.uint8)
            slot[offset:offset + len(flat)] = flat
        self.slots[1].zero_()
        self.words[1, 0] = STEP - 1

    def add_up(self, piece, looks=5):
        peers = np.array([[slot.data_ptr(), word.ctypes.data, word.ctypes.data + 8, log.ctypes.data]
                          for slot, word, log in zip(self.slots, self.words, self.logs)])
        said = ctypes.c_int64(-1)
        adding(piece.dtype)(
            piece.data_ptr(), piece.numel(), peers.ctypes.data, self.size, 1, self.offset, RECORD, STEP, looks,
            ctypes.addressof(said))
        return said.value

    def published(self, dtype, count):
        return self.slots[1][self.offset:].view(dtype)[:count]


def numbers(ranks, count, dtype):
    generator = torch.Generator().manual_seed(ranks + count)
    return [(3 * torch.randn(count, generator=generator)).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [16, 576, 1024])
@pytest.mark.parametrize("ranks, offset", [(2, 0), (3, SLOT), (7, 0)])
def test_numbers_are_added_in_the_order_of_the_ranks_with_torchs_bits(ranks, offset, count, dtype):
    parts = numbers(ranks, count, dtype)
    parts[0][:4] = torch.tensor([float("nan"), float("inf"), -0.0, 3e38])
    parts[1][:4] = torch.tensor([1.0, float("-inf"), -0.0, 3e38])
    peers, piece = Peers(parts, offset), parts[1].clone()
    right = parts[0] + parts[1]
    for part in parts[2:]:
        right += part
    assert peers.add_up(piece) == DONE
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    known = ~right.isnan()
    assert torch.equal(piece.view(kind)[known], right.view(kind)[known]) and torch.equal(piece.isnan(), ~known)
    assert peers.words[:, 0].tolist() == [STEP] * ranks, "published"
    assert torch.equal(peers.published(kind, count), parts[1].view(kind)), "what the others read is what was given"


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_out_of_the_ordinary_is_said_and_nothing_is_added(ranks):
    parts = numbers(ranks, 32, torch.float32)

    def outcome(change):
        peers, piece = Peers(parts), parts[1].clone()
        change(peers)
        said = peers.add_up(piece)
        assert torch.equal(piece, parts[1]) and torch.equal(peers.published(torch.float32, 32), parts[1])
        assert peers.words[1, 0] == STEP, "published all the same"
        return said

    def sleeping(peers):
        peers.words[-1 if ranks > 2 else 0, 1] = 1

    def late(peers):
        peers.words[0, 0] = STEP - 1

    def unlike(byte):
        def change(peers):
            peers.logs[0, RECORD + byte] ^= 1

        return change

    assert [outcome(change) for change in (sleeping, late, unlike(SAME_FROM), unlike(SAME_TO - 1))] \
        == [ASLEEP, LATE, UNLIKE, UNLIKE]


def test_who_is_ahead_is_there():
    parts = numbers(2, 16, torch.float32)
    peers, piece = Peers(parts), parts[1].clone()
    peers.words[0, 0] = STEP + 1
    assert peers.add_up(piece) == DONE and torch.equal(piece, parts[0] + parts[1])


def test_other_numbers_are_added_by_torch():
    assert adding(torch.float64) is None and adding(torch.int64) is None


def sums(shapes, dtype, looks):
    """On a rank that looks so often whether the others are there: sums, what was added up, and what each call said."""
    from tplab.ranks import all_reduce, rank
    from tplab.ranks.context import current

    said, own = [], shared_memory.adding

    def noting(*kind):
        function = own(*kind)

        def call(*given):
            function(*given)
            said.append(ctypes.c_int64.from_address(given[-1]).value)

        return function and call

    shared_memory.adding, current().looks = noting, Looks(looks, looks)
    generator = torch.Generator().manual_seed(rank())
    given = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    given += [t.t() for t in given]
    return [all_reduce(t.clone()) for t in given], given, said


@pytest.mark.parametrize("looks", [1, 10 ** 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_of_a_pool_add_up(size, dtype, looks):
    """A row, an odd one, several, more than a slot holds, in pieces of which one is odd, none; and transposed."""
    shapes = [(1, 576), (1, 577), (3, 64), (1, 200_000), (11, 13_001), (0, 16), (2, 8)] * 2
    with RankPool(size) as pool:
        found = pool.run(sums, shapes, dtype, looks)
    for n, (first, *others) in enumerate(zip(*(given for _, given, _ in found))):
        right = first.clone()
        for other in others:
            right += other
        assert all(torch.equal(made[n], right) for made, _, _ in found), right.shape
    said = {outcome for *_, some in found for outcome in some}
    if dtype == torch.float64:
        assert not said
    else:
        assert UNLIKE not in said and (DONE in said if looks > 1 else LATE in said)


def unlike_shapes():
    from tplab.ranks import all_reduce, rank

    all_reduce(torch.ones(16))
    return all_reduce(torch.ones((2, 16) if rank() else (1, 32)))


def test_another_shape_of_as_many_numbers_is_a_mismatch():
    with RankPool(2) as pool, pytest.raises(CollectiveMismatch, match=r"\[2, 16\]"):
        pool.run(unlike_shapes)
