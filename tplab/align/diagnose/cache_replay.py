"""Hypotheses about keys that a sequence reads and nobody has written for it: the steps are replayed, slot by slot."""

from typing import NamedTuple

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis


class _Read(NamedTuple):
    """A slot in which a sequence finds something else than its own key."""

    step: int
    sequence: int
    position: int
    holds: tuple[int, int] | None  # the (sequence, position) that was written there last; None: nothing
    known: bool  # whether the sequence had computed this key before, in another slot


def _strange_read(case: Case) -> _Read | None:
    """The first such slot of all steps, if blocks are read and written as the tables say."""
    texts, size = case.report.ids, case.report.decode.block_size
    slots: dict[int, tuple[int, int]] = {}
    computed: dict[tuple[int, int], int] = {}
    for step in case.report.decode.steps:
        for number, segment, *_ in step.requests:
            for position in range(segment.start, segment.start + segment.count):
                slot = segment.block_ids[position // size] * size + position % size
                slots[slot], computed[number, position] = (number, position), slot
        for number, segment, *_ in step.requests:
            for position in range(segment.start):
                slot = segment.block_ids[position // size] * size + position % size
                owner, at = slots.get(slot, (number, -1))
                if at != position or texts[owner][:at + 1] != texts[number][:at + 1]:
                    return _Read(step.step_number, number, position, slots.get(slot),
                                 computed.get((number, position), slot) != slot)
    return None


@hypothesis("attn")
def lost_with_its_blocks(case: Case) -> Diagnosis | None:
    """Does a sequence that was preempted read keys that it had, in blocks that it got since then?"""
    read = _strange_read(case) if case.report.decode and case.report.decode.preemptions else None
    if read is not None and read.known:
        return case.diagnosis("preempted_not_recomputed", f"In step {read.step} sequence {read.sequence} comes back "
                                                          f"after a preemption and reads its token {read.position} "
                                                          "from a block that it has just been given: its keys went "
                                                          "with its old blocks and were not computed "
                                                          "again.", step=read.step,
                              sequence=read.sequence, position=read.position)


@hypothesis("attn")
def found_before_it_was_there(case: Case) -> Diagnosis | None:
    """Does a sequence read, in a shared block, a slot that nobody has filled for its beginning?"""
    read = _strange_read(case) if case.report.decode else None
    if read is None or read.known:
        return None
    texts, (owner, at) = case.report.ids, read.holds or (read.sequence, -1)
    if at >= 0 and texts[owner][at] == texts[read.sequence][read.position]:
        return None  # the block's own token, behind another beginning
    return case.diagnosis("cached_before_computed", f"In step {read.step} sequence {read.sequence} finds a block in "
                                                    "the prefix cache, and nobody ever computed the key of token "
                                                    f"{read.position} in it: the block was made findable when its "
                                                    "tokens were known, not when they were computed.", step=read.step,
                          sequence=read.sequence, position=read.position)
