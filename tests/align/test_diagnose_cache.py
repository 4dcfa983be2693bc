"""What a cache gives back, on attention made by hand: shared blocks; which calls there were; rows that are NaN."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.arithmetic import attend
from tplab.align.diagnose import steps
from tplab.align.diagnose.attention import calls
from tplab.align.diagnose.case import Diagnosis
from tplab.align.diagnose.numbers import zero_times_infinity
from tplab.align.diagnose.wrong import distance

TOLERANCE = 6e-5
HEADS, KV_HEADS, DIM = 4, 2, 3
READS = torch.arange(HEADS) // 2


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def diagnosis(fault, sentence, *lookalikes, **numbers):
    return Diagnosis(fault, sentence, "layers.0.attn", numbers, lookalikes)


# Shared blocks.

SIZE = 2


class Shared:
    """Prompts that find blocks of each other: ``texts``, from which position on each was computed, its block tables."""

    def __init__(self, texts, begin, tables, hold=lambda case, prompt: case.k[prompt]):
        self.k = [noise(len(text), KV_HEADS, DIM, seed=number) for number, text in enumerate(texts)]
        self.group, self.scaling, self.query_heads = 2, 0.5, [0, 1, 2, 3]
        self.computed = [range(first, len(text)) for first, text in zip(begin, texts)]
        self.lengths = list(map(len, self.computed))
        self.positions = torch.tensor(sum(map(list, self.computed), []))
        steps = [Some(step_number=number, requests=[(number % len(texts), Some(block_ids=table), None)])
                 for number, table in enumerate(tables)]
        self.report = Some(ids=texts, decode=Some(
            block_size=SIZE, steps=steps, tables=[{number % len(texts): tuple(table)} for number, table in
                                                  enumerate(tables)]))
        self.q = noise(len(self.positions), HEADS, DIM, seed=9)
        self.held = torch.cat([self.right(prompt, hold(self, prompt)) for prompt in range(len(texts))])

    def right(self, prompt, k):
        here = slice(sum(self.lengths[:prompt]), sum(self.lengths[:prompt + 1]))
        visible = torch.arange(len(k))[None] <= self.positions[here][:, None]
        return attend(self.q[here], k[:, READS], 2 * k[:, READS], visible, self.scaling)

    def ours(self, name):
        return self.held

    def reference(self, name):
        return self.q

    def keys(self, prompt, name):
        return self.k[prompt] * (2 if name == "v" else 1)

    def fits(self, tensor, guess):
        return distance(tensor, guess) <= TOLERANCE

    diagnosis = staticmethod(diagnosis)


def of(block, there, owner, prompt):
    """The keys of a prompt whose block is another one's."""
    def hold(case, number):
        k = case.k[number].clone()
        if number == prompt:
            k[block * SIZE:(block + 1) * SIZE] = case.k[owner][there * SIZE:(there + 1) * SIZE]
        return k
    return hold


TEXTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 9, 5], [7, 8, 3, 4, 6]]
TABLES = [[0, 1, 2], [3, 4, 5], [3, 1, 6]]


def test_a_block_of_a_prompt_that_begins_otherwise():
    found = steps.shared_without_parent(Shared(TEXTS, [0, 0, 4], TABLES, of(1, 1, 0, 2)))
    assert found.fault == "prefix_hash_without_parent" and found.numbers == {"block": 1, "prompt": 2, "owner": 0}
    assert found.sentence.startswith("Block 1 of prompt 2") and "behind prompt 0's beginning" in found.sentence


def test_a_block_that_stands_elsewhere_in_the_other_prompt():
    texts, tables = [TEXTS[0], [3, 4, 9]], [[0, 1, 2], [1, 3]]
    found = steps.shared_without_parent(Shared(texts, [0, 2], tables, of(0, 1, 0, 1)))
    assert found.numbers == {"block": 0, "prompt": 1, "owner": 0}


def test_a_table_that_grew_over_several_steps():
    """The first prompt was read in pieces: its first step had one block, the last one all."""
    tables = [[0], [3, 4, 5], [3, 1], TABLES[0], TABLES[1], TABLES[2]]
    assert steps.shared_without_parent(Shared(TEXTS, [0, 0, 4], tables, of(1, 1, 0, 2))).numbers["owner"] == 0


def test_a_block_that_was_given_back_half_full_belongs_to_the_next_who_fills_it():
    """The first prompt's last block, never full, is the second one's first, which the third one finds by right."""
    tables = [[0, 1, 2, 3], [3, 4, 5], [3, 1, 6]]
    assert steps.shared_without_parent(Shared(TEXTS, [0, 0, 4], tables, of(1, 1, 0, 2))).numbers["owner"] == 0
    assert steps.shared_without_parent(Shared(TEXTS, [0, 0, 4], tables)) is None


def test_who_finds_a_strangers_block_does_not_own_it():
    """The fourth prompt is the third one again, and finds what the third one found."""
    def hold(case, prompt):
        return of(1, 1, 0, prompt)(case, prompt) if prompt > 1 else case.k[prompt]
    found = steps.shared_without_parent(Shared([*TEXTS, TEXTS[2]], [0, 0, 4, 4], [*TABLES, [3, 1, 7]], hold))
    assert found.numbers == {"block": 1, "prompt": 2, "owner": 0}


@pytest.mark.parametrize("case", [
    Shared(TEXTS, [0, 0, 4], TABLES),  # the block holds what it should
    Shared(TEXTS, [0, 0, 2], TABLES, of(1, 1, 0, 2)),  # it was computed, not found
    Shared(TEXTS, [0, 0, 4], [*TABLES[:2], [3, 7, 6]], of(1, 1, 0, 2)),  # it is nobody else's
    Shared(TEXTS, [0, 0, 4], TABLES, lambda case, prompt: case.k[prompt] * (1 + 1e-3 * (prompt == 0))),
    Shared([TEXTS[0], TEXTS[1], TEXTS[0][:4] + [8]], [0, 0, 4], [*TABLES[:2], [0, 1, 6]], of(1, 0, 1, 2)),
], ids=["right", "computed", "its own", "another prompt is wrong", "the same beginning"])
def test_what_is_no_strangers_block(case):
    assert steps.shared_without_parent(case) is None


def test_without_a_decode_path_nothing_is_shared():
    assert steps.shared_without_parent(Some(report=Some(decode=None))) is None


# What later calls see: a prompt of three tokens, two more at once, then one, and one.

QUERY, KEY = torch.arange(7)[:, None], torch.arange(7)[None]
NUM_KEYS = torch.tensor([3, 3, 3, 5, 5, 6, 7])[:, None]


def test_where_calls_begin_and_how_long_they_are():
    starts, sizes = calls(QUERY, NUM_KEYS)
    assert starts.flatten().tolist() == [0, 0, 0, 3, 3, 5, 6] and sizes.flatten().tolist() == [3, 3, 3, 2, 2, 1, 1]
    starts, sizes = calls(QUERY[4:], NUM_KEYS[4:])
    assert starts.flatten().tolist() == [4, 5, 6], "the first rows were found in a cache"


# Attention that is NaN.

class Nan:
    """Two sequences of three and two tokens; ``nan`` are the rows that are lost."""

    point = "attn"

    def __init__(self, nan, decoded=()):
        self.places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
        self.decoded, self.held = set(decoded), torch.ones(5, HEADS, DIM)
        self.held[nan, 1, 2] = float("nan")
        self.first = Some(nan=len(nan), size=self.held.numel())

    def ours(self, name):
        return self.held

    diagnosis = staticmethod(diagnosis)


@pytest.mark.parametrize("nan, decoded, fault, says", [
    ([0, 1, 2, 3, 4], (), "nan_mask", "also for the last token"), ([2, 4], (), "mask_inverted", "only the last token"),
    ([0, 1, 3], (), None, "in 3 rows every key is hidden"), ([2, 3], (), None, "in 2 rows"),
    ([1, 2, 3, 4], (), "nan_mask", "7% NaN"), ([0, 1], ((0, 2),), None, "in 2 rows"),
    ([0, 1, 3, 4], ((0, 2),), "nan_mask", ""),  # a token that came alone has nothing to hide
    ([0, 1, 3], ((0, 2), (1, 1)), "nan_mask", ""), ([1, 3], ((0, 2), (1, 1)), "mask_inverted", "")])
def test_which_rows_are_nan(nan, decoded, fault, says):
    found = zero_times_infinity(Nan(nan, decoded))
    assert found.fault == fault and says in found.sentence
    assert found.numbers == {"nan_share": len(nan) / 60, "nan": len(nan)}


def test_where_nothing_is_nan():
    assert zero_times_infinity(Nan([])) is None
