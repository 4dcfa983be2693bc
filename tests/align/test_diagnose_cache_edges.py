"""What a cache gives back, on attention made by hand: shared blocks, rows of other tokens, rows that are lost."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.arithmetic import attend
from tplab.align.diagnose import attention, cache, calls
from tplab.align.diagnose.case import Diagnosis
from tplab.align.diagnose.wrong import Attended, distance

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
    found = cache.shared_without_parent(Shared(TEXTS, [0, 0, 4], TABLES, of(1, 1, 0, 2)))
    assert found.fault == "prefix_hash_without_parent" and found.numbers == {"block": 1, "prompt": 2, "owner": 0}
    assert found.sentence.startswith("Block 1 of prompt 2") and "behind prompt 0's beginning" in found.sentence


def test_a_block_that_stands_elsewhere_in_the_other_prompt():
    texts, tables = [TEXTS[0], [3, 4, 9]], [[0, 1, 2], [1, 3]]
    found = cache.shared_without_parent(Shared(texts, [0, 2], tables, of(0, 1, 0, 1)))
    assert found.numbers == {"block": 0, "prompt": 1, "owner": 0}


def test_a_table_that_grew_over_several_steps():
    """The first prompt was read in pieces: its first step had one block, the last one all."""
    tables = [[0], [3, 4, 5], [3, 1], TABLES[0], TABLES[1], TABLES[2]]
    assert cache.shared_without_parent(Shared(TEXTS, [0, 0, 4], tables, of(1, 1, 0, 2))).numbers["owner"] == 0


def test_a_block_that_was_given_back_half_full_belongs_to_the_next_who_fills_it():
    """The first prompt's last block, never full, is the second one's first, which the third one finds by right."""
    tables = [[0, 1, 2, 3], [3, 4, 5], [3, 1, 6]]
    assert cache.shared_without_parent(Shared(TEXTS, [0, 0, 4], tables, of(1, 1, 0, 2))).numbers["owner"] == 0
    assert cache.shared_without_parent(Shared(TEXTS, [0, 0, 4], tables)) is None


def test_who_finds_a_strangers_block_does_not_own_it():
    """The fourth prompt is the third one again, and finds what the third one found."""
    def hold(case, prompt):
        return of(1, 1, 0, prompt)(case, prompt) if prompt > 1 else case.k[prompt]
    found = cache.shared_without_parent(Shared([*TEXTS, TEXTS[2]], [0, 0, 4, 4], [*TABLES, [3, 1, 7]], hold))
    assert found.numbers == {"block": 1, "prompt": 2, "owner": 0}


@pytest.mark.parametrize("case", [
    Shared(TEXTS, [0, 0, 4], TABLES),  # the block holds what it should
    Shared(TEXTS, [0, 0, 2], TABLES, of(1, 1, 0, 2)),  # it was computed, not found
    Shared(TEXTS, [0, 0, 4], [*TABLES[:2], [3, 7, 6]], of(1, 1, 0, 2)),  # it is nobody else's
    Shared(TEXTS, [0, 0, 4], TABLES, lambda case, prompt: case.k[prompt] * (1 + 1e-3 * (prompt == 0))),
    Shared([TEXTS[0], TEXTS[1], TEXTS[0][:4] + [8]], [0, 0, 4], [*TABLES[:2], [0, 1, 6]], of(1, 0, 1, 2)),
], ids=["right", "computed", "its own", "another prompt is wrong", "the same beginning"])
def test_what_is_no_strangers_block(case):
    assert cache.shared_without_parent(case) is None


def test_without_a_decode_path_nothing_is_shared():
    assert cache.shared_without_parent(Some(report=Some(decode=None))) is None


# Rows of the cache.

class Rows:
    """Sequences of one rank, computed call by call; ``stale``: {(sequence, first position): {row: token, None: lost}}.
    """

    point, wrong_ranks, tolerance, scaling, group = "attn", (0,), TOLERANCE, 0.5, 2
    diagnosis = staticmethod(diagnosis)

    def __init__(self, stale, keys=((3, 3, 3, 4, 5, 6), (2, 2, 3, 4)), off=0.0):
        self.case, self.ones, outs = self, [], []
        for number, num_keys in enumerate(keys):
            n = len(num_keys)
            one = Attended(torch.arange(n), torch.tensor(num_keys), *(
                noise(n, heads, DIM, seed=10 * number + i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))))
            self.ones.append(one)
            for position in range(n):
                holds, seen = list(range(position + 1)), [True] * (position + 1)
                for (sequence, first), rows in stale.items():
                    for row, token in rows.items() if (sequence <= number <= sequence and position >= first) else ():
                        holds[row], seen[row] = token or 0, token is not None
                outs.append(attend(one.q[position:position + 1], one.k[holds][:, READS], one.v[holds][:, READS],
                                   torch.tensor([seen]), self.scaling))
        self.held = torch.cat(outs)
        self.held[-1] *= 1 + off

    def indices(self, name):
        return range(HEADS)

    def sequences(self):
        return iter(self.ones)

    def shard(self, name, rank):
        return self.held


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setattr(calls, "right", lambda case, rank: case)
    monkeypatch.setattr(calls, "explains", lambda case, wrong: distance(case.held, wrong(case, "attn")) <= TOLERANCE)
    return calls.another_row_in_the_cache


@pytest.mark.parametrize("stale, start, row, number, what", [
    ({(0, 3): {1: 0}}, 3, 1, 0, "holds token 0's key and value."),
    ({(0, 4): {3: 2}}, 4, 3, 0, "holds token 2's key and value."),  # the last row before the call
    ({(0, 5): {0: None}}, 5, 0, 0, "is empty."),
    ({(1, 2): {1: None}}, 2, 1, 1, "is empty."),
    ({(1, 3): {2: 0}}, 3, 2, 1, "holds token 0's key and value."),
    ({(0, 4): {2: 0}, (1, 3): {0: 1}}, 4, 2, 0, "holds token 0's key and value."),  # the first of two is named
    ({(0, 3): {1: 0}, (0, 5): {2: None}}, 3, 1, 0, "holds token 0's key and value."),
])
def test_a_row_of_the_cache_that_holds_another_token(ask, stale, start, row, number, what):
    found = ask(Rows(stale))
    assert found.fault == "cache_row_stale" and found.numbers == {"row": row}
    assert found.sentence == f"From position {start} on, row {row} of sequence {number}'s cache {what}"


@pytest.mark.parametrize("case", [
    Rows({}), Rows({(0, 0): {0: None}}),  # nothing is stale; the first call has no past
    Rows({(0, 4): {1: 0}}, off=0.01),  # and the last row is something else again
    Rows({(0, 4): {1: 0, 2: 0, 3: 0}}),  # three rows at once: no single one explains it
])
def test_what_is_no_stale_row(ask, case):
    assert ask(case) is None


def test_only_of_attentions_own_output_and_of_a_wrong_rank(ask):
    case = Rows({(0, 3): {1: 0}})
    case.wrong_ranks = ()
    assert ask(case) is None
    case.wrong_ranks, case.point = (0,), "o_proj"
    assert ask(case) is None


# What later calls see: a prompt of three tokens, two more at once, then one, and one.

QUERY, KEY = torch.arange(7)[:, None], torch.arange(7)[None]
NUM_KEYS = torch.tensor([3, 3, 3, 5, 5, 6, 7])[:, None]


def test_where_calls_begin_and_how_long_they_are():
    starts, sizes = calls._calls(QUERY, NUM_KEYS)
    assert starts.flatten().tolist() == [0, 0, 0, 3, 3, 5, 6] and sizes.flatten().tolist() == [3, 3, 3, 2, 2, 1, 1]
    starts, sizes = calls._calls(QUERY[4:], NUM_KEYS[4:])
    assert starts.flatten().tolist() == [4, 5, 6], "the first rows were found in a cache"


@pytest.mark.parametrize("rule, seen", [
    (calls._not_read, ["0", "01", "012", "3", "34", "5", "6"]),
    (calls._counted_from_0, ["0", "01", "012", "0", "01", "0", "0"]),
    (calls._only_first_masked, ["0", "01", "012", "01234", "01234", "012345", "0123456"]),
    (calls._decoded_lost, ["0", "01", "012", "0123", "01234", "012345", "012346"]),
    (calls._first_kept, ["0", "01", "012", "0123", "01234", "0125", "0126"])])
def test_what_is_seen_where_the_past_is_not_as_it_should_be(rule, seen):
    visible = rule(QUERY, KEY, NUM_KEYS).expand(7, 7)
    assert ["".join(str(key) for key in row.nonzero().flatten().tolist()) for row in visible] == seen


def test_runs_of_one_call_have_no_past():
    assert calls.the_past_is_not_seen_as_it_should_be(Some(recording=Some(num_keys=[4, 4, 4, 4]))) is None


# Attention that is NaN, or sees all.

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
    ([0, 1, 3], ((0, 2), (1, 1)), "nan_mask", ""), ([1, 3], ((0, 2), (1, 1)), "nan_mask", "")])
def test_which_rows_are_nan(nan, decoded, fault, says):
    found = attention.zero_times_infinity(Nan(nan, decoded))
    assert found.fault == fault and says in found.sentence
    assert found.numbers == {"nan_share": len(nan) / 60, "nan": len(nan)}


def test_where_nothing_is_nan():
    assert attention.zero_times_infinity(Nan([])) is None


def seeing(future, num_keys=(3, 3, 3), off=0.0):
    case = Shared([[1, 2, 3]], [0], [[0, 1]])
    seen = torch.arange(3)[None] < (torch.tensor(num_keys)[:, None] if future else torch.arange(3)[:, None] + 1)
    case.held = attend(case.q, case.k[0][:, READS], 2 * case.k[0][:, READS], seen, case.scaling)
    case.held[0] += off
    case.num_keys = lambda prompt: torch.tensor(num_keys)
    return case


@pytest.mark.parametrize("case, sees", [
    (seeing(True), True), (seeing(False), False), (seeing(True, off=0.01), False),
    (seeing(True, (1, 2, 3)), False),  # nothing stood behind any row
    (seeing(True, (2, 2, 3)), True), (seeing(True, (2, 2, 3), off=0.01), False)])
def test_rows_that_had_later_keys_beside_them(case, sees):
    assert attention.sees_all(case) is sees
