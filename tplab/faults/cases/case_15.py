"""A case file; reading on spoils it."""

import time

import torch

from tplab.faults.case_file import Bug, CaseFile, Trial
from tplab.ranks import all_reduce


def reduce(self, partial):
    if len(partial) < 32:
        return all_reduce(partial)
    half = -(-len(partial) // 2)  # a long prompt's sum goes in two messages, through one registered buffer
    first, second = partial.split(half)
    buffer = first.clone()
    message = all_reduce(buffer, async_op=True)
    buffer[:len(second)] = second  # filled again while the first message is under way
    message.wait()
    done = buffer.clone()
    buffer[:len(second)] = second
    return torch.cat([done, all_reduce(buffer[:len(second)])])


def my_reduce(self, partial):
    return all_reduce(partial)  # nothing is computed beside the messages, so one is quicker than two


def for_longer_ones(self, partial):
    return all_reduce(partial) if len(partial) < 64 else reduce(self, partial)


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
            Trial("two prompts at once, of 58 and 19 tokens", [take(58), take(19)]),
            Trial("a prompt of 26 tokens of which five come one by one", [take(26)], 5),
            Trial("a prompt of 51 tokens of which four come one by one", [take(51)], 4))


CASE = CaseFile(
    title="Summaries are about the second half of the text",
    report="Chats are fine. Long prompts are answered as if somebody had read the end of them twice and the beginning "
           "never, the same with one rank as with {ranks}. It began with the release in which long prompts became "
           "quicker. It never happened on the desk of the colleague who wrote that, who says that it is the model.",
    trials=trials,
    bugs=(Bug("RowParallelLinear.reduce", reduce, my_reduce,
              "memory is written again while something under way still needs it", "buffer_reused"),),
    why={
        "A sum is under way in a buffer, and the buffer takes the next rows before it is made: the first rows become "
        "the last ones'.": "",
        "The sum is read before it is there, so each rank goes on with its own summand.":
            "then each rank would hold its own o_partial; the ranks agree, and on one rank there is nothing to add",
        "The rows of the two halves are joined in the wrong order.":
            "then the first half would stand somewhere: no row holds its sum",
        "Attention hides the first half of a long prompt.":
            "attn is right in every row, given what went into it",
    },
    elsewhere={
        "RowParallelLinear.partial": "every rank's o_partial and mlp_partial are right",
        "attend": "attn is right, given its inputs",
        "token_positions": "q_rope and k_rope are right in every row",
    },
    hints=((1, "Compare a prompt of 31 tokens with one of 32."),
           (1, "o_proj is the first guilty point, and o_partial before it is right: look at what stands between."),
           (2, "Take rows of o_proj's first half and look for them in its second half.")),
    false_repairs=({"RowParallelLinear.reduce": for_longer_ones}, {"RowParallelLinear.reduce": patient}),
    production="A longer threshold moves the bug to longer prompts, and a pause is enough until a machine is busy: "
               "the first customer with a full machine has it again.",
    story="Short prompts are right, so find the length at which it begins: 31 are right, 32 are not. The first guilty "
          "point is o_proj, its summands are right, and all ranks agree, one alone as well: so nothing is wrong with "
          "who adds up what. Row 0 of o_proj is row 22 of 43, and so on: the first half holds the second. Something "
          "was written over before it was used, and the code says what: a sum is started, the buffer is filled again, "
          "and then comes the wait. The sum takes what it finds. Elsewhere that is a race, which a quiet desk wins; "
          "here the lab makes sums as late as they may be made. The wait, and a copy out, belong before the buffer is "
          "filled again, or there must be a second buffer. But nothing is computed beside the two messages: so one, "
          "of all rows, is right and quicker.",
    sources=(("mori: two phases wrote to the same output buffers, and results were wrong now and then, by who was "
              "quicker; the change copies them out.", "https://github.com/ROCm/mori/pull/93"),
             ("aiter: a collective returned while other ranks still read its input; a script that fills the input "
              "with NaN behind the call finds them in the result.", "https://github.com/ROCm/aiter/pull/4082")),
)
