"""Hypotheses about runs whose numbers are right: what did they cost, and what did the ranks draw?"""

from tplab.align.diagnose.cache import stale_sentence
from tplab.align.diagnose.case import Diagnosis
from tplab.align.report import AlignReport


def read_too_much(report: AlignReport) -> Diagnosis | None:
    """Did the ranks read more of the checkpoint than they keep?"""
    if not report.load_stats:
        return None
    stored = next(iter(report.checkpoint.tensors.values())).dtype.itemsize
    kept = [stats.parameter_bytes // report.dtype.itemsize * stored for stats in report.load_stats]
    times = max(stats.bytes_read / keeps for stats, keeps in zip(report.load_stats, kept))
    if times < 1.2:
        return None
    return Diagnosis("full_copy_on_every_rank",
                     f"The numbers are right, but a rank read {times:.1f} times the bytes that "
                     "it keeps: whole tensors were read and cut afterwards.", "load", {"times": times})


def drew_differently(report: AlignReport) -> Diagnosis | None:
    """Did all ranks draw the same tokens?"""
    for rank, drawn in enumerate(report.decode.drawn[1:] if report.decode else (), 1):
        for place, token in report.decode.drawn[0].items():
            if drawn.get(place) != token:
                return Diagnosis("rank_local_sampling",
                                 f"From the same right logits rank 0 drew token {token} and rank "
                                 f"{rank} token {drawn.get(place)}: each decides by itself what only all of them "
                                 "together "
                                 "can know.", "drawn", {"rank": rank, "prompt": place[0], "position": place[1]})
    return None


def computed_again(report: AlignReport) -> Diagnosis | None:
    """Were tokens computed more than once?"""
    if report.decode is None or report.decode.preemptions:
        return None
    done = sum(sequence.segment.count for step in report.decode.steps for sequence in step.sequences)
    needed = sum(map(len, report.computed))
    if done == needed:
        return None
    return Diagnosis("cache_ignored",
                     f"The numbers are right, but {done} tokens were computed where {needed} were needed: "
                     "steps begin at the first token again instead of using the cache.", "steps",
                     {"computed": done, "needed": needed})


def kept_blocks(report: AlignReport) -> Diagnosis | None:
    """Did all blocks come back?"""
    left = report.decode.blocks_left if report.decode else 0
    if not left:
        return None
    return Diagnosis("block_leaked", f"The numbers are right, but {left} block{'s' * (left > 1)} of {len(report.ids)} "
                     f"finished sequence{'s' * (len(report.ids) > 1)} never came back.", "blocks", {"left": left})


def stale_without_harm(report: AlignReport) -> Diagnosis | None:
    """Did the ranks work with other tables than the scheduler's, and were lucky?"""
    says = stale_sentence(report.decode) if report.decode else ""
    return Diagnosis("stale_block_table", f"{says} This time it did no harm.", "blocks") if says else None


HYPOTHESES = (read_too_much, drew_differently, computed_again, stale_without_harm, kept_blocks)
