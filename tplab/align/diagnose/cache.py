"""Hypotheses about a cache that gives back something else than what was put in: slots, tables, shared blocks."""

import torch

from tplab.align.arithmetic import attend
from tplab.align.diagnose.attention import keys_and_values, prompts
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import causal
from tplab.align.report import AlignReport, DecodeFacts


def _block_tables(facts: DecodeFacts):
    """Step by step and sequence by sequence: the step, the sequence, the ranks' table, the scheduler's."""
    for step, tables in zip(facts.steps, facts.tables):
        for request_id, segment, *_ in step.requests:
            yield step.step_number, request_id, list(segment.block_ids), list(tables[request_id])


def stale_block_table(report: AlignReport) -> str:
    """Where the ranks first worked with another block table than the scheduler's; empty if they never did."""
    for step, number, at_ranks, true in _block_tables(report.decode) if report.decode else ():
        if at_ranks[:len(true)] != true:
            return (f"In step {step} the ranks were told that sequence {number} has the blocks {at_ranks}; the "
                    f"scheduler had given it {true}. The old blocks had been taken from it by then.")
    return ""


@hypothesis("attn")
def stale_table(case: Case) -> Diagnosis | None:
    """Did the ranks work with the tables that the scheduler had?"""
    says = stale_block_table(case.report)
    return case.diagnosis("stale_block_table", says) if says else None


@hypothesis("attn")
def written_too_early(case: Case) -> Diagnosis | None:
    """Does a decoding token find its own slot empty, and its predecessor's holding its own key?"""
    for prompt, ours, positions, q in prompts(case):
        k, v = keys_and_values(case, prompt)
        for row, position in enumerate(positions.tolist()):
            if (prompt, position) not in case.decoded:
                continue
            # What slot s holds after the tokens up to this one were written, the decoding ones one slot too early.
            holds = [s + 1 if (prompt, s + 1) in case.decoded else s for s in range(position)]
            empty, here = torch.zeros_like(k[:1]), slice(row, row + 1)
            guess = attend(q[here], torch.cat([k[holds], empty]), torch.cat([v[holds], empty]),
                           torch.ones(1, position + 1, dtype=torch.bool), case.scaling)
            if not case.fits(ours[here], guess):
                return None
            return case.diagnosis("slot_off_by_one", f"Token {position} of prompt {prompt}, the first to be decoded, "
                                  "finds its own slot empty and its predecessor's overwritten with its own key: it was "
                                  "written one slot too early.", position=position)


@hypothesis("attn")
def shared_without_parent(case: Case) -> Diagnosis | None:
    """Do shared blocks hold the keys of another prompt, with the same tokens behind another beginning?"""
    if case.report.decode is None:
        return None
    size, texts = case.report.decode.block_size, case.report.ids
    tables = {number: at_ranks for _, number, at_ranks, _ in _block_tables(case.report.decode)}  # the last ones
    strangers, computed = [], {}  # block → the prompt that computed what it holds, and as which of its own blocks
    for prompt, ours, positions, q in prompts(case):
        k, v = (tensor.clone() for tensor in keys_and_values(case, prompt))
        found = int(positions[0]) // size
        for index, block_id in enumerate(tables[prompt][:found]):
            owner, at = computed.get(block_id, (prompt, index))
            here, there = (slice(i * size, (i + 1) * size) for i in (index, at))
            if texts[owner][:there.stop] != texts[prompt][:here.stop]:
                k[here], v[here] = (tensor[there] for tensor in keys_and_values(case, owner))
                strangers.append((index, prompt, owner))
        computed.update({block_id: (prompt, index) for index, block_id in enumerate(tables[prompt]) if index >= found})
        visible = causal(positions[:, None], torch.arange(len(k))[None], None)
        if not case.fits(ours, attend(q, k, v, visible, case.scaling)):
            return None
    if strangers:
        index, prompt, owner = strangers[0]
        return case.diagnosis("prefix_hash_without_parent", f"Block {index} of prompt {prompt} was not computed but "
                              f"found, and holds the keys that its tokens have behind prompt {owner}'s beginning: a "
                              "block's key must include its parent's.", block=index, prompt=prompt, owner=owner)
