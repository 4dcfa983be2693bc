"""A case file. It holds the solution: do not read on if you want to solve the case."""

from course.cases.case_file import Bug, CaseFile, Trial, edited, engines_own

PLACE = "Scheduler._admit"
# A preempted sequence has lost its keys with its blocks; the edit takes it for one that decodes.
_admit, my_admit = edited(
    PLACE, "    count = min( ->     if sequence.status is Status.PREEMPTED:  # it was decoding, so one token is new\n"
    "        computed = sequence.num_tokens - 1\n    count = min("), engines_own(PLACE)


def the_first_time(self, sequence, budget):
    return (my_admit if sequence.metrics.preemptions < 2 else _admit)(self, sequence, budget)


def unless_found(self, sequence, budget):
    found = sequence.block_table.get_computed_blocks(sequence.token_ids)
    return (_admit if found else my_admit)(self, sequence, budget)


def trials(take):
    crowded = {"block_size": 2, "enable_prefix_caching": False}
    return (Trial("prompts of 17 and 18 tokens in a cache of 14 blocks of two, the last eight of each one by one",
                  [take(17), take(18)], 8, {**crowded, "num_blocks": 14}),
            Trial("three prompts in a cache of 11 blocks of two, the last twelve tokens of each one by one",
                  [take(18), take(19), take(16)], 12, {**crowded, "num_blocks": 11}),
            Trial("two prompts with room for all", [take(19), take(14)], 5))


CASE = CaseFile(
    title="Under load, some answers change their subject in the middle of a sentence",
    report="It happens in one of a few hundred requests, and only between nine and eleven in the morning. The answer "
           "begins well and then goes on about something else, in correct grammar. The same prompt sent again is "
           "right. It is the same with one rank as with {ranks}. We replayed a bad minute with a small cache: there it "
           "is reproducible.",
    trials=trials,
    bugs=(Bug(PLACE, _admit, "outdated data is used as if it were current",
              "preempted_not_recomputed"),),
    why={
        "A preempted sequence comes back as one that decodes: only its newest token is computed, and the keys of the "
        "others are read from blocks that it has just been given.": "",
        "The ranks get the block table that the sequence had before it was preempted.":
            "the tables that the ranks get are the scheduler's, in every step",
        "A block that is still in use is given to another sequence.": "no block is in two tables at the same time",
        "The positions of a sequence that comes back start at 0.": "q_rope and k_rope are right in every row",
    },
    elsewhere={
        "block_ids_for_ranks": "the ranks have the scheduler's tables",
        "Scheduler._preempt": "it gives back the blocks and sets the number of computed tokens to 0, which is right",
        "slot_mapping": "each token is written to its slot",
        "token_positions": "the positions are right",
        "BlockPool.get_new_block": "the blocks that it gives out were free",
    },
    not_what={"a special case is treated wrongly": "where do the keys of the earlier tokens come from?"},
    hints=("Nothing is wrong without a preemption: use align_decode as in the reported run, or with few "
           "num_blocks.",
           "attn is the first guilty point, in one sequence, from the step on in which it comes back.",
           "report.decode.steps: how many tokens are computed in that step, and how many has the sequence?"),
    false_repairs=[{PLACE: wrong} for wrong in (the_first_time, unless_found)],
)
