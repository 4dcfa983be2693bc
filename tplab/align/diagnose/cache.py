"""Hypotheses about a cache that gives back something else than what was put in: slots, tables, shared blocks."""

import torch

from tplab.align.diagnose.attention import attend, causal, keys_and_values, prompts
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.report import DecodeFacts


def told_and_true(facts: DecodeFacts):
    """Step by step and sequence by sequence: the step, the sequence, the table that the ranks got, the scheduler's."""
    for step, tables in zip(facts.steps, facts.tables):
        for sequence in step.sequences:
            yield step.number, sequence.number, list(sequence.segment.block_ids), list(tables[sequence.number])


def stale_sentence(facts: DecodeFacts) -> str:
    """Where the ranks first worked with another block table than the scheduler's; empty if they never did."""
    for step, number, told, true in told_and_true(facts):
        if told[:len(true)] != true:
            return (f"In step {step} the ranks were told that sequence {number} has the blocks {told}; the scheduler "
                    "had "
                    f"given it {true}. The old blocks had been taken from it by then.")
    return ""


def stale_table(case: Case) -> Diagnosis | None:
    """Did the ranks work with the tables that the scheduler had?"""
    says = case.report.decode and stale_sentence(case.report.decode)
    return case.found("stale_block_table", says, relative=case.first.relative) if says else None


def written_too_early(case: Case) -> Diagnosis | None:
    """Does a decoding token find its own slot empty, and its predecessor's holding its own key?"""
    if case.report.decode is None:
        return None
    alone = {(s.number, s.segment.start) for step in case.report.decode.steps for s in step.sequences
             if s.segment.count == 1 and s.segment.start}
    for prompt, ours, positions, q in prompts(case):
        k, v = keys_and_values(case, prompt)
        for row, position in enumerate(positions.tolist()):
            # What slot s holds after the tokens up to this one were written, the decoding ones one slot too early.
            holds = [s + 1 if (prompt, s + 1) in alone else s for s in range(position)]
            seen = slice(row, row + 1), torch.ones(1, position + 1, dtype=torch.bool)
            if (prompt, position) not in alone:
                continue
            empty = torch.zeros_like(k[:1])
            guess = attend(case, q[seen[0]], torch.cat([k[holds], empty]), torch.cat([v[holds], empty]), seen[1])
            if not case.fits(ours[seen[0]], guess):
                return None
            return case.found("slot_off_by_one",
                              f"Token {position} of prompt {prompt}, the first to be decoded, finds its "
                              "own slot empty and its predecessor's overwritten with its own key: it was written one "
                              "slot "
                              "too early.", position=position)
    return None


def shared_without_parent(case: Case) -> Diagnosis | None:
    """Do shared blocks hold the keys of another prompt, with the same tokens behind another beginning?"""
    if case.report.decode is None:
        return None
    facts, texts = case.report.decode, case.report.ids
    tables: dict[int, list[int]] = {}
    for _, number, told, _ in told_and_true(facts):
        tables.setdefault(number, told)
    strangers = []
    for prompt, ours, positions, q in prompts(case):
        k, v = keys_and_values(case, prompt)
        k, v = k.clone(), v.clone()
        for index in range(int(positions[0]) // facts.block_size):
            block = range(index * facts.block_size, (index + 1) * facts.block_size)
            owner = next((n for n, table in tables.items() if n < prompt
                          and tables[prompt][index] in table[index:index + 1]),
                         prompt)
            if texts[owner][:block.stop] != texts[prompt][:block.stop]:
                theirs = keys_and_values(case, owner)
                k[block.start:block.stop], v[block.start:block.stop] = (t[block.start:block.stop] for t in theirs)
                strangers.append((index, prompt, owner))
        visible = causal(positions[:, None], torch.arange(len(k))[None], None)
        if not case.fits(ours, attend(case, q, k, v, visible)):
            return None
    if not strangers:
        return None
    index, prompt, owner = strangers[0]
    return case.found("prefix_hash_without_parent",
                      f"Block {index} of prompt {prompt} was not computed but found, and holds "
                      f"the keys that its tokens have behind prompt {owner}'s beginning: a block's key must include "
                      "its "
                      "parent's.", block=index, prompt=prompt, owner=owner)


HYPOTHESES = {"attn": (stale_table, written_too_early, shared_without_parent)}
