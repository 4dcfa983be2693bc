"""What only the lab's own engine tells: its steps, its block tables, what it cost."""

import itertools
from collections.abc import Iterator

import torch

from tplab.align.diagnosis import Diagnosis
from tplab.align.floors import LOCAL
from tplab.align.guilty import by_row
from tplab.align.reference import hf_model
from tplab.align.report import AlignReport, DecodeFacts
from tplab.checks import counted
from tplab.faults import MUSEUM

# Bugs of which only the steps tell, and which the museum does not have.
TITLES = {
    "preempted_not_recomputed": "a sequence that was preempted is not computed again",
    "cached_before_computed": "a block can be found before its keys are computed",
    "prefix_never_found": "equal beginnings are not found in the prefix cache",
    "softmax_before_gather": "each rank normalises the probabilities of its own part of the vocabulary"}


def fact(fault: str, point: str, words: str, **numbers: float) -> Diagnosis:
    """A diagnosis in the pattern of all sentences: the bug's title, then where it was seen."""
    title = MUSEUM[fault].title if fault in MUSEUM else TITLES[fault]
    return Diagnosis(fault, f"{title[:1].upper()}{title[1:]}. {words}", point, numbers)


class Embedded:
    """The embedding's output of a decode run, and what it should be made of."""

    def __init__(self, report: AlignReport):
        self.report, self.row_of = report, report.recording.row_of
        self.weight = hf_model(report.checkpoint, report.dtype).get_input_embeddings().weight.detach()
        self.ours = report.recording.points["embed"][0].tensor

    def fits(self, tensor: torch.Tensor, guess: torch.Tensor) -> bool:
        return tensor.shape == guess.shape and bool((by_row(tensor, guess) <= 3 * LOCAL[self.report.dtype]).all())


def rows_in_other_orders(case: "Embedded") -> Diagnosis | None:
    """Do other ranks hold the sequences of a step in another order than rank 0?"""
    weight, texts, shards = case.weight, case.report.ids, case.report.plan.ranks

    def ids_of(sequences) -> torch.Tensor:
        return torch.tensor([texts[number][position] for number, position in sum(sequences, [])])
    for step in case.report.decode.steps:
        sequences = [[(s.request_id, s.segment.start + i) for i in range(s.segment.count)] for s in step.requests]
        embedded = case.ours[[case.row_of[place] for places in sequences for place in places]]
        token_ids = ids_of(sequences)
        if case.fits(embedded, weight[token_ids]):
            continue
        for order in itertools.islice(itertools.permutations(sequences), 1, 120):
            order_ids = ids_of(order)
            for ranks in (shards[1:], shards[1::2]):
                guess = torch.zeros_like(embedded)
                for shard in shards:
                    ids = order_ids if shard in ranks else token_ids
                    guess += weight[ids] * ((ids >= shard.vocab.start) & (ids < shard.vocab.stop))[:, None]
                if case.fits(embedded, guess):
                    names = [[places[0][0] for places in some] for some in (sequences, order)]
                    return fact("row_order", "embed", f"In step {step.step_number}, rank 0 holds them in the order "
                                f"{names[0]}, rank {ranks[0].rank} in the order {names[1]}: the all-reduce adds up "
                                "embeddings of unlike tokens.", step=step.step_number)
        return None


def rejected_draft_kept(case: "Embedded") -> Diagnosis | None:
    """Does a text hold a guess where the model chose another token?"""
    for step, number, position, token in _drafted(case.report.decode):
        row, true = case.row_of.get((number, position)), case.report.ids[number][position]
        if row is not None and token != true and case.fits(case.ours[row:row + 1], case.weight[[token]]):
            return fact("rejected_draft_kept", "embed", f"In step {step}, token {token} was drafted for position "
                        f"{position} of sequence {number}, where the model chose {true}, and it stayed.", step=step,
                        sequence=number, position=position)


def _drafted(facts: DecodeFacts):
    """Every drafted token: the step, the sequence, the position for which it was drafted, and what it was."""
    for step in facts.steps:
        for request in step.requests:
            end = request.segment.start + request.segment.count
            for position, token in enumerate(request.draft, end - request.num_draft_tokens):
                yield step.step_number, request.request_id, position, token


def stale_block_table(report: AlignReport) -> str:
    """Where the ranks first worked with another block table than the scheduler's; empty if they never did."""
    for step, tables in zip(report.decode.steps, report.decode.tables):
        for number, segment, *_ in step.requests:
            at_ranks, true = list(segment.block_ids), list(tables[number])
            if at_ranks[:len(true)] != true:
                return (f"In step {step.step_number}, the ranks were told that sequence {number} has the blocks "
                        f"{at_ranks}; the scheduler had given it {true}.")
    return ""


# What a sequence finds in a slot that holds no key of its own.
STRANGE_READS = {
    "preempted_not_recomputed": "reads its token {position} from a block that it has just been given",
    "prefix_hash_without_parent": "finds a block, from position {position} on, that was computed behind "
    "sequence {owner}'s beginning",
    "rejected_draft_findable": "finds a block by tokens drafted for sequence {owner}; the block now holds "
    "token {token} at position {position}",
    "cached_before_computed": "finds a block in which the key of token {position} was never computed"}


def _strange_read(report: AlignReport) -> tuple[int, int, int, tuple[int, int], bool] | None:
    """The first such slot of all steps, if blocks are read and written as the tables say: in which step which position
    of which sequence is read; the (sequence, position) that was written there last, or (sequence, -1); and whether the
    sequence had computed this key before, in another slot."""
    texts, size = report.ids, report.decode.block_size
    written: dict[int, tuple[int, int]] = {}
    computed: dict[tuple[int, int], int] = {}

    def slots(segment, begin: int, end: int):
        return ((position, segment.block_ids[position // size] * size + position % size)
                for position in range(begin, end))
    for step in report.decode.steps:
        for number, segment, *_ in step.requests:
            for position, slot in slots(segment, segment.start, segment.start + segment.count):
                written[slot], computed[number, position] = (number, position), slot
        for number, segment, *_ in step.requests:
            for position, slot in slots(segment, 0, segment.start):
                owner, at = written.get(slot, (number, -1))
                if at != position or texts[owner][:at + 1] != texts[number][:at + 1]:
                    return (step.step_number, number, position, (owner, at),
                            computed.get((number, position), slot) != slot)
    return None


def strange_blocks(report: AlignReport, name: str) -> Diagnosis | None:
    """Did the ranks work with the tables that the scheduler had? If so, does a sequence read a slot that holds no key
    of its own?"""
    if says := stale_block_table(report):
        return fact("stale_block_table", name, says)
    facts, texts = report.decode, report.ids
    if (read := _strange_read(report)) is None:
        return None
    step, number, position, (owner, at), known = read
    token = texts[number][position]
    if known and not facts.preemptions:
        return None
    fault = ("preempted_not_recomputed" if known else
            "prefix_hash_without_parent" if at >= 0 and texts[owner][at] == token else
            "rejected_draft_findable" if (owner, position, token) in {drafted[1:] for drafted in _drafted(facts)} else
            "cached_before_computed")
    says = STRANGE_READS[fault].format(position=position, owner=owner, token=texts[owner][at])
    return fact(fault, name, f"In step {step}, sequence {number} {says}.", step=step, sequence=number,
                position=position)


def read_too_much(report: AlignReport) -> Diagnosis | None:
    stored = next(iter(report.checkpoint.tensors.values())).dtype.itemsize
    times = max((stats.bytes_read / (stats.parameter_bytes // report.dtype.itemsize * stored)
                 for stats in report.load_stats), default=0)
    if times >= 1.2:
        return fact("full_copy_on_every_rank", "load", f"The numbers are right, but a rank read {times:.1f} times the "
                    "bytes that it keeps.", times=times)


def ranks_drew_differently(report: AlignReport) -> Diagnosis | None:
    for rank, drawn in enumerate(report.decode.drawn[1:], 1):
        for place, token in report.decode.drawn[0].items():
            if drawn.get(place) != token:
                return fact("rank_local_sampling", "drawn", f"From the same right logits, rank 0 drew token {token} "
                            f"and rank {rank} token {drawn.get(place)}.", rank=rank, prompt=place[0], position=place[1])


def drawn_not_the_most_probable(report: AlignReport) -> Diagnosis | None:
    """Is a drawn token not the best one of the logits? Perhaps it is the best one of the ranks' probabilities, each
    normalized over its own words."""
    logits, places = report.evidence.get("logits"), sorted(report.decode.drawn[0])
    if logits is None or len(places) != len(logits.ours):
        return None
    drawn = torch.tensor([[report.decode.drawn[0][place]] for place in places])
    words = logits.ours.shape[-1]
    index = torch.where((0 <= drawn) & (drawn < words), drawn, words)  # behind the words: an id that is no token's

    def below_the_largest(scores: torch.Tensor) -> torch.Tensor:
        scores = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
        return scores.max(-1).values - scores.gather(-1, index)[:, 0]

    behind = below_the_largest(logits.ours.float())
    behind_apart = below_the_largest(torch.cat([shard.float().log_softmax(-1) for shard in logits.shards], -1))
    wrong = (behind > 1e-2 * logits.ours.abs().max()).nonzero().flatten().tolist()
    if not wrong:
        return None
    number, position = places[wrong[0]]
    says = (f"All logits are right, and {len(wrong)} of {len(drawn)} drawn tokens are not the most probable ones: "
            f"behind token {position} of prompt {number}, the drawn one's logit is {behind[wrong[0]]:.1f} below the "
            "largest.")
    numbers = {"prompt": number, "position": position}
    if behind_apart.max() > 1e-2:
        return Diagnosis(None, says, "drawn", numbers)
    return fact("softmax_before_gather", "drawn", says, **numbers)


def prefix_never_found(report: AlignReport) -> Diagnosis | None:
    """Does a text begin at its first token, although another one with the same first block was computed before?"""
    facts = report.decode
    if not facts.prefix_caching:
        return None
    size, full, seen = facts.block_size, {}, set()  # full: {block: the text whose first block it holds}
    for step in facts.steps:
        for number, segment, *_ in step.requests:
            begin = report.ids[number][:size]
            before = [other for other in full.values() if report.ids[other][:size] == begin]
            if number not in seen and not segment.start and before and segment.prompt_length > size:
                return fact("prefix_never_found", "steps", f"The numbers are right, but prompt {number} is computed "
                            f"from its first token on, although it begins as prompt {before[0]} does, whose blocks are "
                            "full and went to no other sequence.", prompt=number, before=before[0])
        for number, segment, *_ in step.requests:
            seen.add(number)
            full = {block: other for block, other in full.items() if block not in segment.block_ids}
            if segment.start + segment.count >= size:
                full[segment.block_ids[0]] = number


def tokens_computed_again(report: AlignReport) -> Diagnosis | None:
    if report.decode.preemptions or next(_drafted(report.decode), None):
        return None
    done = sum(sequence.segment.count for step in report.decode.steps for sequence in step.requests)
    needed = sum(map(len, report.computed))
    if done != needed:
        return fact("cache_ignored", "steps", f"The numbers are right, but {done} tokens were computed where {needed} "
                    "were needed.", computed=done, needed=needed)


def stale_table_without_harm(report: AlignReport) -> Diagnosis | None:
    says = stale_block_table(report)
    return fact("stale_block_table", "blocks", f"{says} This time it did no harm.") if says else None


def blocks_not_released(report: AlignReport) -> Diagnosis | None:
    left, many = report.decode.blocks_left, len(report.ids)
    if left:
        return fact("block_leaked", "blocks", f"The numbers are right, but {counted(left, 'block')} of {many} finished "
                    f"sequence{'s' * (many > 1)} never came back.", left=left)


def costs(report: AlignReport) -> Iterator[Diagnosis]:
    """What is wrong with a run of which all numbers are right."""
    procedures = read_too_much, *(() if report.decode is None else (
        ranks_drew_differently, drawn_not_the_most_probable, prefix_never_found, tokens_computed_again,
        stale_table_without_harm, blocks_not_released))
    return filter(None, (procedure(report) for procedure in procedures))
