"""Errors in which runs ended, made by hand: which rank left what out, which waits, which sequences hold the blocks."""

import pytest
from helpers.sentences import hold

from tplab.align import diagnose
from tplab.align.diagnose import errors
from tplab.engine.errors import EngineError, StandstillError, StrictError
from tplab.ranks import OpRecord, RankError
from tplab.ranks.errors import Cause


def op(seq, name="all_reduce", shape=(2, 8), line=7, file="mine.py"):
    return OpRecord(seq, name, shape, "float32", 0, file, line, True)


def failed(logs, kinds=None, text="says"):
    kinds = kinds or ["waiting"] * len(logs)
    return RankError("x", [Cause(rank, kind, f"{text} {rank}") for rank, kind in enumerate(kinds)], logs)


A, B = op(2), op(2, "all_gather")


@pytest.mark.parametrize("logs, number, skipped", [
    ([[op(1), A], [op(1), B]], 2, True), ([[op(1), op(2, "barrier"), op(3)], [op(1), A, op(3, "barrier")]], 2, True),
    ([[op(1), op(2, line=8)], [op(1), A]], None, None),  # the same from another line: nothing that hurts
    ([[op(1), op(2, shape=(1,), file="b.py")], [op(1), A]], 2, True),
    ([[op(1), op(2, shape=(1,))], [op(1), A]], 2, False),
    ([[op(1), A], [op(1), A], [op(1), B]], 2, True), ([[A], [A]], None, None), ([[], []], None, None),
    ([[op(1), op(2, shape=(1,), line=8)], [op(1), A]], 2, True)])
def test_the_first_collective_in_which_ranks_are_not_together(logs, number, skipped):
    found = hold(errors.different_collectives(failed(logs)))
    assert (found and (found.fault, found.numbers)) == (number and (
        "collective_skipped" if skipped else None, {"collective": number}))


@pytest.mark.parametrize("lengths, kinds, seen", [
    ((3, 2), ("waiting", "returned"), True), ((2, 3), ("returned", "waiting"), True),
    ((3, 2, 2), ("waiting", "returned", "returned"), True), ((3, 2, 1), ("waiting", "running", "returned"), True),
    ((1, 2), ("waiting", "waiting"), True), ((3, 3), ("waiting", "waiting"), False),
    ((3, 0), ("waiting", "returned"), True), ((3, 2), ("waiting", "running"), False)])
def test_which_rank_waits_for_which(lengths, kinds, seen):
    logs = [[op(seq) for seq in range(1, length + 1)] for length in lengths]
    found = hold(errors.different_collectives(failed(logs, kinds)))
    assert (found and (found.fault, found.numbers)) == (
        ("collective_skipped", {"collective": max(lengths)}) if seen else None)


@pytest.mark.parametrize("kinds", [("raised", "waiting"), ("waiting", "died")])
def test_where_a_rank_failed_by_itself_nothing_was_left_out(kinds):
    error = failed([[A], [B]], kinds, "raised ValueError: x\nline two,")
    assert errors.different_collectives(error) is errors.still_running(error) is None
    if kinds[0] == "raised":
        assert hold(errors.one_rank_failed(error)).numbers == {"rank": 0}
    else:
        assert errors.one_rank_failed(error) is None, "the first of them did not"
    assert errors.one_rank_failed(EngineError("x")) is errors.one_rank_failed(RankError("x")) is None


@pytest.mark.parametrize("kinds, rank", [
    (("running", "waiting"), 0), (("waiting", "running", "waiting"), 1), (("running", "running"), 0),
    (("running", "returned"), 0), (("waiting", "waiting"), None)])
def test_a_rank_that_takes_long(kinds, rank):
    found = hold(errors.still_running(failed([[A]] * len(kinds), kinds)))
    assert (found and found.numbers) == (None if rank is None else {"rank": rank})


@pytest.mark.parametrize("used, held, waiting, fault, numbers", [
    (5, 3, [(0, 9, 4)], "block_leaked", {"leaked": 2}), (4, 3, [], "block_leaked", {"leaked": 1}),
    (3, 3, [(0, 9, 4)], None, None), (2, 3, [(0, 9, 8)], None, None),
    (5, 3, [(0, 9, 4), (1, 8, 8)], "full_length_after_prefix_hit", {"tokens": 8}),
    (3, 3, [(7, 4, 5)], "full_length_after_prefix_hit", {"tokens": 4})])
def test_an_engine_that_stands_still(used, held, waiting, fault, numbers):
    found = hold(errors.standstill(StandstillError("x", used, held, waiting)))
    assert (found and (found.fault, found.numbers)) == (fault and (fault, numbers))
    assert errors.standstill(EngineError("x")) is None


def test_what_strict_checks_saw():
    found = hold(errors.strict_checks(StrictError("block 3", drawn=())))
    assert found.fault is None
    found = hold(errors.strict_checks(StrictError("other tokens", drawn=[{0: 1}, {0: 2}])))
    assert found.fault == "rank_local_sampling"
    assert errors.strict_checks(EngineError("x")) is None


def test_an_error_of_which_nothing_is_known():
    found = hold(diagnose(EngineError("a\nb")))
    assert (found.fault, found.point) == (None, "error")
