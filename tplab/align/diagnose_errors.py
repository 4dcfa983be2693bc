"""Hypotheses about runs that ended in an error instead of numbers."""

from tplab.align.case import Diagnosis
from tplab.errors import TplabError
from tplab.ranks import RankError


def different_collectives(error: TplabError) -> Diagnosis | None:
    """Did the ranks go through the same collectives?"""
    if not isinstance(error, RankError) or any(cause.kind in ("raised", "died") for cause in error.causes.values()):
        return None
    for number, records in enumerate(zip(*error.logs), 1):
        if len({(record.op, record.shape, record.dtype) for record in records}) > 1:
            calls = "; ".join(f"rank {rank}: {record}" for rank, record in enumerate(records))
            return Diagnosis("collective_skipped", f"The ranks go different ways at collective {number} of the run ({calls}). "
                             "One of them left out a collective that the others are in.", "error", {"collective": number})
    counts = [len(log) for log in error.logs]
    if not counts or min(counts) == max(counts):
        return None
    waiting, gone = counts.index(max(counts)), counts.index(min(counts))
    return Diagnosis("collective_skipped", f"Rank {gone} was done after {counts[gone]} collectives, rank {waiting} waits in "
                     f"number {counts[waiting]}, {error.logs[waiting][-1]}. It was left out on rank {gone}.", "error",
                     {"collective": counts[waiting]})


def nothing_goes_on(error: TplabError) -> Diagnosis | None:
    """An engine that stands still: who waits, and who holds the blocks?"""
    scheduler = getattr(error, "scheduler", None)
    if scheduler is None:
        return None
    for sequence in scheduler.waiting:
        if sequence.num_computed_tokens >= sequence.num_tokens:
            return Diagnosis("full_length_after_prefix_hit", f"Sequence {sequence.number} waits with all {sequence.num_tokens} "
                             "of its tokens found in the cache: nothing is left to compute, so no logits for its next "
                             "token. The last token of a prompt must always be computed.", "error",
                             {"tokens": sequence.num_tokens})
    held = {block for s in (*scheduler.running, *scheduler.waiting) for block in s.table.blocks}
    leaked = scheduler.pool.num_used - len(held)
    if leaked > 0:
        return Diagnosis("block_leaked", f"{scheduler.pool.num_used} blocks count as used, but the sequences that are there "
                         f"hold {len(held)}: {leaked} never came back from sequences that have ended.", "error",
                         {"leaked": leaked})
    return None


HYPOTHESES = (different_collectives, nothing_goes_on)
