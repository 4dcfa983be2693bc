"""A case file. It holds the solution: do not read on if you want to solve the case."""

from course.cases.case_file import Bug, CaseFile, Trial
from tplab.ranks import all_gather, rank, world_size


def reduce(self, partial):
    if world_size() == 1:
        return partial
    everyone = all_gather(partial, dim=-1).split(partial.shape[-1], dim=-1)
    return partial + everyone[rank() - 1]  # the left neighbour's summand


def two_hops(self, partial):
    if world_size() == 1:
        return partial
    everyone = all_gather(partial, dim=-1).split(partial.shape[-1], dim=-1)
    total = partial + everyone[rank() - 1]
    return total + everyone[rank() - 2] if world_size() > 2 else total


def trials(take):
    return (Trial("a prompt of 26 tokens", [take(26)]),
            Trial("two prompts, the last five tokens of each one by one", [take(19), take(14)], 5))


def three_ranks(config, tensor_parallel_size):
    return "" if tensor_parallel_size > 2 else "on one or two ranks its result is the right one"


CASE = CaseFile(
    title="Tested on two cards, nonsense on four",
    report="The new communication layer has passed every test on two cards, bit for bit: sums, gathers, a week of "
           "traffic. The first machine with more cards writes nonsense; here it is with {ranks} ranks. Same model, "
           "same prompt, no error, no hang, and all ranks' op logs show the same calls.",
    trials=trials, needs=three_ranks,
    bugs=(Bug("RowParallelLinear.reduce", reduce, "a part is used as if it were the whole",
              "all_reduce_subset"),),
    why={
        "Each rank adds its left neighbour's summand to its own, which is the whole sum on two ranks only.": "",
        "The ranks add in different orders, and the rounding grows with their number.":
            "rounding is a millionth here; the ranks differ by as much as the numbers themselves",
        "With more ranks than KV heads a rank holds the wrong head.":
            "k and v are right on every rank; o_partial is right, and o_proj is not",
        "A rank skips an all-reduce and reads an old result.":
            "every rank is in the same collectives; a skipped one would stop all ranks",
    },
    elsewhere={
        "RowParallelLinear.partial": "every o_partial is right",
        "RowParallelLinear.load": "every rank has the right columns: its partial is right",
        "VocabParallelEmbedding.forward": "embed is right, and the same on all ranks",
        "TensorParallelMLP.forward": "it returns what the reduce returns",
    },
    hints=("The first guilty point is layers.0.o_proj; o_partial is right on every rank. report.rank_spread is "
           "large.",
           "Of which partials is a rank's o_proj the sum? There are few combinations: try them.",
           "Two of them, on every rank: its own and that of one other rank."),
    false_repairs=({"RowParallelLinear.reduce": two_hops},),
)
