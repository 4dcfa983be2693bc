"""A case file. It holds the solution: do not read on if you want to solve the case."""

from course.cases.case_file import Bug, CaseFile, Trial, engines_own
from course.judge.exercise import edited

my_positions = engines_own("token_positions")


def token_positions(segment):
    if segment.count == 1 and segment.start:  # it decodes, so it comes after the prompt
        first = max(segment.start, segment.prompt_length)
        return range(first, first + 1)
    return range(segment.start, segment.start + segment.count)


def unless_chunk(segment):
    if segment.start % 16 == 0:
        return my_positions(segment)
    return token_positions(segment)


one_before = edited(token_positions, "segment.prompt_length) -> segment.prompt_length - 1)")


def trials(take):
    again = take(21)
    return (Trial("a prompt of 33 tokens, read 16 at a time, and four tokens more", [take(37)], 4,
                  {"max_num_batched_tokens": 16}),
            Trial("the same prompt of 21 tokens twice, its prefix in the cache", [again + take(3), again + take(3)], 3,
                  {"one_by_one": True}),
            Trial("prompts of 30 and 35 tokens, read 16 at a time", [take(34), take(39)], 4,
                  {"max_num_batched_tokens": 16}))


CASE = CaseFile(
    title="A few lengths of prompt get a wrong answer",
    report="A fuzzer found it, not a user: with chunks of 16 tokens, a prompt of 33 gets another answer than from "
           "transformers. 32, and 34 to 48 are right; 17 and 49 are wrong, too. In chunks of 32 the wrong lengths are "
           "33 and 65. It is the same with {ranks} ranks as with one. At first we did not believe the fuzzer.",
    trials=trials,
    bugs=(Bug("token_positions", token_positions, "a special case is treated wrongly",
              "rope_positions"),),
    why={
        "A single token is treated as one that decodes and gets a position after the prompt; the last chunk of a "
        "prompt can be a single token, too.": "",
        "The last chunk is read with the mask of a whole prompt.":
            "attn is right, given its inputs: q_rope is the first guilty point, in one row",
        "The last token of the prompt is written into the slot of the token before it.":
            "its key is in its own slot; it was rotated by a wrong position before it was written",
        "A chunk's positions start at 0 again.":
            "then the second chunk would be wrong, and prompts of 20 and of 34 tokens as well",
    },
    elsewhere={
        "Scheduler.schedule": "it cuts 33 into 16, 16 and 1, which is right",
        "TensorParallelAttention.apply_rope": "it rotates every token by the position that it gets",
        "slot_mapping": "every token is in its slot",
        "Rotary.__call__": "its tables are right for the positions that it gets",
    },
    hints=("33 = 2 × 16 + 1. Align along the decode path with max_num_batched_tokens=16, not with one forward "
           "pass.",
           "One row of q_rope is wrong: that of the prompt's last token.",
           "It is rotated as if its position were larger by one. Which function makes the positions?"),
    false_repairs=[{"token_positions": wrong} for wrong in (unless_chunk, one_before)],
)
