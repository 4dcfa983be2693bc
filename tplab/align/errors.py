"""Procedures about runs that ended in an error instead of numbers: what the error does not say itself."""

from tplab.align.diagnosis import Diagnosis
from tplab.engine.errors import StandstillError, StrictError
from tplab.errors import TplabError
from tplab.ranks import RankError


def _ended(fault: str | None, sentence: str, **numbers: float) -> Diagnosis:
    return Diagnosis(fault, sentence, "error", numbers)


def different_collectives(error: TplabError) -> Diagnosis | None:
    """Did the ranks go through the same collectives, if none failed?"""
    if not isinstance(error, RankError) or not any(error.logs) or any(
            cause.kind in ("raised", "died") for cause in error.causes.values()):
        return None
    by_number = [{record.seq: record for record in log} for log in error.logs]
    for number in sorted(set.intersection(*map(set, by_number))):
        records = [known[number] for known in by_number]
        if len(set(map(str, records))) == 1:
            continue
        calls = "; ".join(f"rank {rank}: {record}" for rank, record in enumerate(records))
        if len({(record.op, record.file, record.line) for record in records}) == 1:
            return _ended(None, f"The ranks meet in one line, in collective #{number}, with tensors that do not fit "
                          f"together ({calls}). None was left out; what they bring is wrong.", collective=number)
        return _ended("collective_skipped", f"The ranks go different ways at collective #{number} ({calls}). One of "
                      "them left out a collective that the others are in.", collective=number)
    # A rank that is still running may reach it later; one that has returned, or waits elsewhere, will not.
    ends = {rank: max(known, default=0) for rank, known in enumerate(by_number)}
    waiting = max(ends, key=ends.get)
    gone = [rank for rank, cause in error.causes.items() if cause.kind != "running" and ends[rank] < ends[waiting]]
    if not gone:
        return None
    record = by_number[waiting][ends[waiting]]
    return _ended("collective_skipped", f"Rank {waiting} waits in collective #{record.seq}, {record}, and rank "
                  f"{gone[0]} went on without it. It was left out on rank {gone[0]}.", collective=record.seq)


def standstill(error: TplabError) -> Diagnosis | None:
    """An engine that stands still: which sequences wait, and which hold the blocks?"""
    if not isinstance(error, StandstillError):
        return None
    for number, tokens, computed in error.waiting:
        if computed >= tokens:
            return _ended("full_length_after_prefix_hit", f"Sequence {number} waits with all {tokens} of its tokens "
                          "found in the cache: nothing is left to compute, so no logits for its next token. The "
                          "last token of a prompt must always be computed.", tokens=tokens)
    if (leaked := error.used - error.held) > 0:
        return _ended("block_leaked", f"{error.used} blocks count as used, but the sequences that are there hold "
                      f"{error.held}: {leaked} never came back from sequences that have ended.", leaked=leaked)


def ranks_drew_differently(error: TplabError) -> Diagnosis | None:
    """Did the strict checks see that ranks drew different tokens?"""
    if isinstance(error, StrictError) and error.drawn:
        return _ended("rank_local_sampling", f"The ranks drew different tokens ({error}): each sampled by itself, "
                      "where one choice must hold for all.")


ERRORS = (different_collectives, standstill, ranks_drew_differently)
