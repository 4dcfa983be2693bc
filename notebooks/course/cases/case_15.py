"""A case file. It holds the solution: do not read on if you want to solve the case."""

import time

import torch

from course.cases.case_file import Bug, CaseFile, Trial
from tplab.ranks import all_reduce


def reduce(self, partial):
    if len(partial) < 32:
        return all_reduce(partial)
    half = -(-len(partial) // 2)  # a long prompt's sum is sent in two messages
    first, second = partial.split(half)
    buffer = first.clone()
    message = all_reduce(buffer, async_op=True)
    buffer[:len(second)] = second
    message.wait()
    done = buffer.clone()
    buffer[:len(second)] = second
    return torch.cat([done, all_reduce(buffer[:len(second)])])


def for_longer_ones(self, partial):
    return all_reduce(partial) if len(partial) < 1000 else reduce(self, partial)


def patient(self, partial):
    first, second = partial.split(-(-len(partial) // 2)) if len(partial) > 1 else (partial, partial[1:])
    buffer = first.clone()
    message = all_reduce(buffer, async_op=True)
    time.sleep(0.001)  # "this is always enough"
    buffer[:len(second)] = second
    message.wait()
    return torch.cat([buffer, all_reduce(second.clone())])


def trials(take):
    return (Trial("a prompt of 43 tokens", [take(43)]),
            Trial("three prompts at once, of 400, 390 and 380 tokens", [take(400), take(390), take(380)]),
            Trial("a prompt of 26 tokens, the last five one by one", [take(26)], 5),
            Trial("a prompt of 51 tokens, the last four one by one", [take(51)], 4))


CASE = CaseFile(
    title="Summaries are about the second half of the text",
    report="Chats are right. Answers to long prompts look as if the end was read twice and the beginning never, the "
           "same with one rank as with {ranks}. It began with the release that made long prompts faster. The "
           "colleague who wrote that change never saw it on their own machine.",
    trials=trials, collectives=4,
    bugs=(Bug("RowParallelLinear.reduce", reduce,
              "memory is overwritten while it is still needed", "buffer_reused"),),
    why={
        "A sum is started in a buffer, and the buffer gets the next rows before the sum is computed: the first rows "
        "become a copy of the last ones.": "",
        "The sum is read before it is complete, so each rank goes on with its own summand.":
            "then each rank would hold its own o_partial; the ranks agree, and it is wrong on one rank, too",
        "The rows of the two halves are joined in the wrong order.":
            "then the sums of the first half would be in other rows: no row holds them",
        "Attention hides the first half of a long prompt.": "attn is right in every row, given its inputs",
    },
    elsewhere={
        "RowParallelLinear.partial": "every rank's o_partial and mlp_partial are right",
        "attend": "attn is right, given its inputs",
        "token_positions": "q_rope and k_rope are right in every row",
    },
    hints=("Compare a prompt of 31 tokens with one of 32.",
           "o_proj is the first guilty point, and o_partial before it is right: look at the function between "
           "them.",
           "Take rows of o_proj's first half and look for them in its second half."),
    false_repairs=({"RowParallelLinear.reduce": for_longer_ones}, {"RowParallelLinear.reduce": patient}),
)
