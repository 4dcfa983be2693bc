"""Hypotheses about runs whose numbers are right: what did they cost, and what did the ranks draw?"""

from tplab.align.diagnose.cache import stale_block_table
from tplab.align.diagnose.case import Diagnosis
from tplab.align.diagnose.registry import COST, hypothesis
from tplab.align.report import AlignReport


@hypothesis(COST)
def read_too_much(report: AlignReport) -> Diagnosis | None:
    """Did the ranks read more of the checkpoint than they keep?"""
    stored = next(iter(report.checkpoint.tensors.values())).dtype.itemsize
    times = max((stats.bytes_read / (stats.parameter_bytes // report.dtype.itemsize * stored)
                 for stats in report.load_stats), default=0)
    if times >= 1.2:
        return Diagnosis("full_copy_on_every_rank", f"The numbers are right, but a rank read {times:.1f} times the "
                         "bytes that it keeps: whole tensors were read and cut afterwards.", "load", {"times": times})


@hypothesis(COST)
def ranks_drew_differently(report: AlignReport) -> Diagnosis | None:
    """Did all ranks draw the same tokens?"""
    for rank, drawn in enumerate(report.decode.drawn[1:] if report.decode else (), 1):
        for place, token in report.decode.drawn[0].items():
            if drawn.get(place) != token:
                return Diagnosis("rank_local_sampling", f"From the same right logits rank 0 drew token {token} and "
                                 f"rank {rank} token {drawn.get(place)}: each decides by itself what only all of them "
                                 "together can know.", "drawn",
                                 {"rank": rank, "prompt": place[0], "position": place[1]})


@hypothesis(COST)
def tokens_computed_again(report: AlignReport) -> Diagnosis | None:
    """Were tokens computed more than once?"""
    if report.decode is None or report.decode.preemptions:
        return None
    done = sum(sequence.segment.count for step in report.decode.steps for sequence in step.requests)
    needed = sum(map(len, report.computed))
    if done != needed:
        return Diagnosis("cache_ignored", f"The numbers are right, but {done} tokens were computed where {needed} were "
                         "needed: steps begin at the first token again instead of using the cache.", "steps",
                         {"computed": done, "needed": needed})


@hypothesis(COST)
def stale_table_without_harm(report: AlignReport) -> Diagnosis | None:
    """Did the ranks work with other tables than the scheduler's, and were lucky?"""
    says = stale_block_table(report)
    return Diagnosis("stale_block_table", f"{says} This time it did no harm.", "blocks") if says else None


@hypothesis(COST)
def blocks_not_released(report: AlignReport) -> Diagnosis | None:
    """Did all blocks come back?"""
    left, many = report.decode.blocks_left if report.decode else 0, len(report.ids)
    if left:
        return Diagnosis("block_leaked", f"The numbers are right, but {left} block{'s' * (left > 1)} of {many} "
                         f"finished sequence{'s' * (many > 1)} never came back.", "blocks", {"left": left})
