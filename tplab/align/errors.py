"""Procedures about runs that ended in an error instead of numbers."""

from tplab.align.diagnosis import Diagnosis
from tplab.checkpoint import CheckpointError
from tplab.engine.errors import RequestError, StandstillError, StrictError
from tplab.errors import TplabError
from tplab.ranks import RankError
from tplab.shard import ShardPlanError


def _ended(fault: str | None, sentence: str, **numbers: float) -> Diagnosis:
    return Diagnosis(fault, sentence, "error", numbers)


def _hung(error: TplabError) -> bool:
    """Whether no rank failed: the ranks wait for each other, or do not end."""
    return isinstance(error, RankError) and not any(cause.kind in ("raised", "died") for cause in error.causes.values())


def different_collectives(error: TplabError) -> Diagnosis | None:
    """Did the ranks go through the same collectives?"""
    if not _hung(error) or not any(error.logs):
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


def still_running(error: TplabError) -> Diagnosis | None:
    """Is a rank still running?"""
    busy = [cause for cause in error.causes.values() if cause.kind == "running"] if _hung(error) else []
    if busy:
        waits = [f"rank {cause.rank} {cause.text}" for cause in error.causes.values() if cause.kind == "waiting"]
        others = f", while {' and '.join(waits)}" if waits else ""
        return _ended(None, f"Rank {busy[0].rank} {busy[0].text}{others}. It takes longer than the call was given, or "
                      "it never ends; no collective was left out so far.", rank=busy[0].rank)


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


def strict_checks(error: TplabError) -> Diagnosis | None:
    """Did the strict checks see it, and is it that ranks drew different tokens?"""
    if not isinstance(error, StrictError):
        return None
    if not error.drawn:
        return _ended(None, f"The strict checks stopped the engine before the damage spread: {error}")
    return _ended("rank_local_sampling", f"The ranks drew different tokens ({error}): each sampled by itself, "
                  "where one choice must hold for all.")


def one_rank_failed(error: TplabError) -> Diagnosis | None:
    """Did one rank raise or die, so that the others lost their connection to it?"""
    if isinstance(error, RankError) and error.first is not None and error.first.kind in ("raised", "died"):
        return _ended(None, f"Rank {error.first.rank} {error.first.text.splitlines()[0]}. The error is in this rank "
                      "alone; the others only lost it.", rank=error.first.rank)


def refused(error: TplabError) -> Diagnosis | None:
    """Was the request, the checkpoint or the plan refused before anything was computed?"""
    if isinstance(error, RequestError | CheckpointError | ShardPlanError):
        return _ended(None, f"Nothing was computed wrongly; it was refused: {str(error).splitlines()[0]}")


ERRORS = (different_collectives, still_running, standstill, strict_checks, one_rank_failed, refused)
