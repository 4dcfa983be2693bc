"""Hypotheses about sequences that are decoded in one batch: does one of them get what belongs to another?"""

import torch

from tplab.align.arithmetic import attend
from tplab.align.diagnose.attention import keys_and_values, prompts
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis


def _together(case: Case) -> dict[tuple[int, int], tuple[int, int]]:
    """For each ``(prompt, position)`` that was decoded beside others: the position of the first of them, and that of
    the longest."""
    found = {}
    for step in case.report.decode.steps if case.report.decode else ():
        rows = [(request_id, segment.start) for request_id, segment, *_ in step.requests if segment.count == 1]
        if len(rows) > 1:
            found |= dict.fromkeys(rows, (rows[0][1], max(position for _, position in rows)))
    return found


@hypothesis("attn")
def mask_of_the_first_row(case: Case) -> Diagnosis | None:
    """Do decoding sequences see as many keys as the first of their batch may?"""
    batches, wrong = _together(case), []
    for prompt, ours, positions, q in prompts(case):
        k, v = keys_and_values(case, prompt)
        for row, position in enumerate(positions.tolist()):
            first, longest = batches.get((prompt, position), (position, position))
            # Shorter sequences are filled up with their own newest key, so that is what stands behind it.
            seen = [min(key, position) for key in range(min(first, longest) + 1)]
            here = slice(row, row + 1)
            if not case.fits(ours[here], attend(q[here], k[seen], v[seen], torch.ones(1, len(seen), dtype=torch.bool),
                                                case.scaling)):
                return None
            wrong += [(prompt, position, first)] * (first != position)
    if wrong:
        prompt, position, first = wrong[0]
        return case.diagnosis(
            "mask_of_another_row", f"Token {position} of prompt {prompt}, decoded beside others, sees {first + 1} "
            f"keys, as many as the first sequence of its batch; it may see {position + 1}.",
            prompt=prompt, position=position, keys=first + 1)
