"""Hypotheses about runs whose numbers are right: what did they cost, and what did the ranks draw?"""

import torch

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
def drawn_by_parts_of_the_vocabulary(report: AlignReport) -> Diagnosis | None:
    """Is a drawn token the best one of the ranks' probabilities, each normalized over its own words, and not of the
    logits?"""
    logits, places = report.evidence.get("logits"), sorted(report.decode.drawn[0]) if report.decode else []
    if logits is None or len(places) != len(logits.ours):
        return None
    drawn = torch.tensor([report.decode.drawn[0][place] for place in places])
    parts = [shard.float().log_softmax(-1) for shard in logits.shards]
    ours, apart = logits.ours.float(), torch.cat(parts, -1)
    behind = ours.max(-1).values - ours.gather(-1, drawn[:, None])[:, 0]
    wrong = (behind > 1e-2 * ours.abs().max()).nonzero().flatten().tolist()
    if not wrong or (apart.max(-1).values - apart.gather(-1, drawn[:, None])[:, 0]).max() > 1e-2:
        return None
    number, position = places[wrong[0]]
    return Diagnosis("softmax_before_gather", f"All logits are right, and {len(wrong)} of {len(drawn)} drawn tokens "
                                              f"are not the most probable ones: behind token {position} of prompt "
                                              f"{number} one was drawn whose logit is {behind[wrong[0]]:.1f} below "
                                              "the largest. They are the best by the ranks' probabilities, each "
                                              "normalized over its own part of the "
                                              "vocabulary.", "drawn", {"prompt": number, "position": position})


@hypothesis(COST)
def prefix_never_found(report: AlignReport) -> Diagnosis | None:
    """Does a text begin at its first token, although another one with the same first block was computed before?"""
    facts = report.decode
    if facts is None or not facts.prefix_caching:
        return None
    size, full, seen = facts.block_size, {}, set()  # full: {block: the text whose first block it holds}
    for step in facts.steps:
        for number, segment, *_ in step.requests:
            begin = report.ids[number][:size]
            before = [other for other in full.values() if report.ids[other][:size] == begin]
            if number not in seen and not segment.start and before and segment.prompt_length > size:
                return Diagnosis("prefix_never_found", f"The numbers are right, but prompt {number} is computed from "
                                                       f"its first token on, although it begins as prompt {before[0]} "
                                                       "does, whose blocks are full and were handed out to nobody "
                                                       "since: equal beginnings are not found in the prefix "
                                                       "cache.", "steps",
                                 {"prompt": number, "before": before[0]})
        for number, segment, *_ in step.requests:
            seen.add(number)
            full = {block: other for block, other in full.items() if other == number or block not in segment.block_ids}
            if segment.start + segment.count >= size:
                full[segment.block_ids[0]] = number


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
