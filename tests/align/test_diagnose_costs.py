"""Runs whose numbers are right, and slots that hold what was never written: facts made by hand, told in exact words."""

from types import SimpleNamespace as Some
from typing import NamedTuple

import pytest
import torch

from tplab.align import facts as told
from tplab.align.report import Evidence

F32, BF16 = torch.float32, torch.bfloat16


class Request(NamedTuple):
    request_id: int
    segment: Some
    draft: tuple = ()
    num_draft_tokens: int = 0


def request(number, start, count, blocks=(), prompt=9):
    return Request(number, Some(start=start, count=count, block_ids=blocks, prompt_length=prompt))


def facts(*steps, size=2, tables=None, **more):
    """Steps of ``request(…)``; ``tables``: what the scheduler had, where the ranks had something else."""
    made = [Some(step_number=number, requests=list(step)) for number, step in enumerate(steps)]
    right = [{number: tuple(segment.block_ids) for number, segment, *_ in step} for step in steps]
    return Some(**{"steps": made, "tables": tables or right, "block_size": size, "prefix_caching": True, "drawn": [{}],
                   "preemptions": 0, "blocks_left": 0} | more)


# What was read.

@pytest.mark.parametrize("read, kept, stored, dtype, times", [
    ([120], [100], F32, F32, 1.2), ([119], [100], F32, F32, None), ([100, 250], [100, 100], F32, F32, 2.5),
    ([100], [100], BF16, F32, 2), ([50], [100], BF16, F32, None), ([60], [100], BF16, F32, 1.2),
    ([400], [100], F32, BF16, 2), ([], [], F32, F32, None)])
def test_a_rank_that_reads_more_than_it_keeps(read, kept, stored, dtype, times):
    """``read`` bytes of the file's ``stored`` numbers for parameters of ``kept`` bytes in the run's dtype."""
    report = Some(checkpoint=Some(tensors={"a": Some(dtype=stored)}), dtype=dtype, load_stats=[
        Some(bytes_read=r, parameter_bytes=k) for r, k in zip(read, kept)])
    report.decode = None  # so nothing else is asked
    assert [(found.fault, found.numbers, found.point) for found in told.costs(report)] == [
        ("full_copy_on_every_rank", {"times": times}, "load")] * bool(times)


# What was drawn.

@pytest.mark.parametrize("drawn, rank, token", [
    ([{(0, 3): 5, (1, 2): 6}] * 2, None, None), ([{(0, 3): 5, (1, 2): 6}, {(0, 3): 5, (1, 2): 7}], 1, 7),
    ([{(0, 3): 5}, {(0, 3): 5}, {(0, 3): 8}], 2, 8), ([{(0, 3): 5}, {}], 1, None), ([{(0, 3): 5}], None, None)])
def test_a_rank_that_drew_another_token(drawn, rank, token):
    found = told.ranks_drew_differently(Some(decode=facts(drawn=drawn)))
    if rank is None:
        assert found is None
        return
    place = (1, 2) if token == 7 else (0, 3)
    assert found.fault == "rank_local_sampling" and found.point == "drawn"
    assert found.numbers == {"rank": rank, "prompt": place[0], "position": place[1]}


LOGITS = torch.tensor([[4.0, 1.0, 5.0, 5.2], [9.0, 1.0, 2.0, 2.0]])  # two words of each of two ranks
PLACES = [(0, 3), (1, 2)]


def drawing(*tokens, logits=LOGITS, places=PLACES):
    evidence = {} if logits is None else {"logits": Evidence(logits, logits, list(logits.split(2, 1)))}
    report = Some(evidence=evidence, decode=facts(drawn=[dict(zip(places, tokens))]))
    return told.drawn_not_the_most_probable(report)


def test_a_token_that_is_the_best_of_its_ranks_probabilities_only():
    found = drawing(0, 0)
    assert found.fault == "softmax_before_gather" and found.numbers == {"prompt": 0, "position": 3}
    assert drawing(3, 0) is None, "the best of all"
    for best_of_nothing in ((1, 0), (2, 0), (0, 1), (-1, 0), (4, 0)):  # the last two are no tokens
        found = drawing(*best_of_nothing)
        assert found.fault is None and found.point == "drawn", best_of_nothing
    assert drawing(0, 0, logits=None) is None and drawing(0, logits=LOGITS, places=PLACES[:1]) is None


def test_a_tie_is_drawn_either_way():
    assert drawing(2, 0, logits=LOGITS + torch.tensor([0, 0, 0.15, 0])) is None, "within a hundredth of the largest"


# Beginnings that were computed before.

TEXTS = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9], [1, 7, 7, 7, 7], [1, 2], [1, 2, 8]]


@pytest.mark.parametrize("steps, number, before", [
    ([[request(0, 0, 4, (0, 1))], [request(1, 0, 4, (2, 3))]], 1, 0),
    ([[request(0, 0, 4, (0, 1))], [request(1, 2, 2, (0, 3))]], None, None),  # found
    ([[request(0, 0, 4, (0, 1)), request(1, 0, 4, (2, 3))]], None, None),  # at once: nothing was there yet
    ([[request(0, 0, 1, (0, 1))], [request(1, 0, 4, (2, 3))]], None, None),  # its first block is not full
    ([[request(0, 0, 2, (0,))], [request(1, 0, 4, (2, 3))]], 1, 0),
    ([[request(0, 0, 1, (0,))], [request(0, 1, 1, (0,))], [request(1, 0, 4, (2, 3))]], 1, 0),
    ([[request(0, 0, 4, (0, 1))], [request(2, 0, 4, (2, 3))]], None, None),  # begins otherwise
    ([[request(0, 0, 4, (0, 1))], [request(2, 0, 4, (0, 3))], [request(1, 0, 4, (4, 5))]], None, None),  # given away
    ([[request(0, 0, 4, (0, 1))], [request(2, 0, 4, (1, 3))], [request(1, 0, 4, (4, 5))]], 1, 0),
    ([[request(0, 0, 4, (0, 1))], [request(0, 4, 1, (0, 1, 2))], [request(1, 0, 4, (4, 5))]], 1, 0),
    ([[request(0, 0, 4, (0, 1))], [request(3, 0, 2, (4,), prompt=2)]], None, None),  # no more than the block itself
    ([[request(0, 0, 4, (0, 1))], [request(4, 0, 3, (4, 5), prompt=3)]], 4, 0),
    ([[request(1, 0, 1, (4,))], [request(0, 0, 4, (0, 1))], [request(1, 0, 4, (2, 3))]], None, None),  # came back
    ([[request(0, 0, 4, (0, 1))], [request(4, 2, 1, (0, 5))],
      [request(1, 0, 4, (2, 3))]], 1, 4),  # the sequence that found it holds it, too
    ([[request(0, 0, 4, (0, 1))], [request(2, 0, 4, (5, 0))], [request(1, 0, 4, (6, 7))]], None, None)])  # given away
def test_an_equal_beginning_that_was_not_found(steps, number, before):
    found = told.prefix_never_found(Some(decode=facts(*steps), ids=TEXTS))
    assert (found and found.numbers) == (number and {"prompt": number, "before": before})
    if found:
        assert found.fault == "prefix_never_found" and found.point == "steps"
    assert told.prefix_never_found(Some(decode=facts(*steps, prefix_caching=False), ids=TEXTS)) is None


# Tables and slots.

def about(decode, texts=TEXTS):
    return told.strange_blocks(Some(decode=decode, ids=texts), "layers.0.attn")


STALE = facts([request(0, 0, 2, (4,))], [request(0, 2, 1, (4, 5)), request(1, 0, 1, (6,))],
              tables=[{0: (4,)}, {0: (4, 5), 1: (7,)}])


def test_tables_that_are_not_the_schedulers():
    assert about(STALE).fault == "stale_block_table"
    found = told.stale_table_without_harm(Some(decode=STALE))
    assert found.fault == "stale_block_table"
    longer = facts([request(0, 0, 2, (4, 9))], tables=[{0: (4,)}])
    assert about(longer) is told.stale_table_without_harm(Some(decode=longer)) is None


LOST, EARLY, PARENT = "preempted_not_recomputed", "cached_before_computed", "prefix_hash_without_parent"


@pytest.mark.parametrize("steps, fault, read", [
    # Sequence 0 lost its blocks; when it comes back, the new ones hold nothing, or another's.
    ([[request(0, 0, 4, (0, 1))], [request(1, 0, 2, (0,))], [request(0, 4, 1, (2, 3, 4))]], LOST, (2, 0, 0)),
    ([[request(0, 0, 4, (0, 1))], [request(2, 0, 2, (1,))], [request(0, 4, 1, (0, 1, 2))]], EARLY, (2, 0, 2)),
    ([[request(0, 0, 4, (0, 1))], [request(0, 4, 1, (0, 3, 2))]], LOST, (1, 0, 2)),
    ([[request(1, 2, 2, (0, 1))]], EARLY, (0, 1, 0)),  # block 0 was never written
    ([[request(0, 0, 1, (0,))], [request(1, 2, 2, (0, 1))]], EARLY, (1, 1, 1)),  # half of it was
    ([[request(0, 0, 4, (0, 1))], [request(1, 3, 1, (0, 1))]], None, None),  # found as it was computed
    ([[request(0, 0, 4, (0, 1))], [request(1, 4, 1, (0, 1, 2))]], EARLY, (1, 1, 3)),  # another token
    ([[request(2, 0, 2, (0,))], [request(1, 2, 1, (0, 1))]], EARLY, (1, 1, 1)),
    ([[request(1, 2, 2, (0, 1)), request(0, 0, 2, (0,))]], None, None),  # written in the same step
    # The block's own tokens behind another beginning.
    ([[request(5, 0, 4, (0, 1))], [request(6, 4, 1, (2, 1, 3))]], EARLY, (1, 6, 0)),
    ([[request(5, 0, 4, (0, 1)), request(6, 0, 2, (2,))], [request(6, 4, 1, (2, 1, 3))]], PARENT, (1, 6, 2)),
    # A block that was given back half full belongs to the next who fills it.
    ([[request(5, 0, 3, (0, 1))], [request(2, 0, 2, (1,))], [request(2, 2, 2, (1, 3))]], None, None)])
def test_what_a_sequence_finds_in_its_blocks(steps, fault, read):
    texts = [*TEXTS, [1, 2, 3, 4], [7, 7, 3, 4, 5]]
    found = about(facts(*steps, preemptions=1), texts)
    assert (found and found.fault, found and tuple(found.numbers.values())[:3]) == (fault, read)
    without = about(facts(*steps), texts)
    assert (without and without.fault) == (None if fault == LOST else fault), "nothing was preempted"
