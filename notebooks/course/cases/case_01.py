"""A case file. It holds the solution: do not read on if you want to solve the case."""

from course.cases.case_file import Bug, CaseFile, Trial, edited
from tplab.faults.fault import two_ranks
from tplab.ranks import all_reduce, world_size

forward = edited("DecoderLayer.forward", "self.mlp(normed) -> all_reduce(self.mlp(normed))", all_reduce=all_reduce)


def halved(self, hidden, cos, sin, context):
    hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, context)
    return hidden + all_reduce(self.mlp(self.post_attention_layernorm(hidden))) / 2


def divided(self, hidden, cos, sin, context):
    hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, context)
    return hidden + all_reduce(self.mlp(self.post_attention_layernorm(hidden))) / world_size()


def trials(take):
    return (Trial("a prompt of 26 tokens", [take(26)]),
            Trial("two prompts at once, of 31 and 7 tokens", [take(31), take(7)]),
            Trial("two prompts, the last five tokens of each one by one", [take(19), take(14)], 5))


CASE = CaseFile(
    title="Right on one card, wrong on two, worse on four",
    report="Same checkpoint, same prompt, greedy. With one rank the text is the same as with transformers. With "
           "{ranks} ranks the engine still writes sentences, but its facts are wrong, and each rank that we add makes "
           "it worse. There is no error and no NaN, and all ranks agree with each other. It began when the MLP became "
           "a separate module.",
    trials=trials, needs=two_ranks,
    bugs=(Bug("DecoderLayer.forward", forward,
              "a complete sum is added up over the ranks a second time", "all_reduce_twice"),),
    why={
        "The MLP returns a complete sum to the block, and the block adds up the ranks' equal copies of it: the MLP "
        "counts as many times as there are ranks.": "",
        "The MLP's summands are not added up, so each rank goes on with its own part.":
            "then the ranks would differ after the block, but the report's rank_spread is only rounding",
        "down_proj is cut at the wrong columns, so each rank adds products of other ranks.":
            "then mlp_partial would be wrong on some rank; every partial and the point mlp are right",
        "The residual is added by every rank before the sum.":
            "then the residual would count too often, and the MLP's output once; compute which of the two counts too "
            "often",
    },
    elsewhere={
        "RowParallelLinear.reduce": "its result, the point mlp, is right: one sum",
        "TensorParallelMLP.forward": "its last point, mlp, is right: it returns the complete sum",
        "RowParallelLinear.partial": "every rank's mlp_partial is right",
    },
    hints=("Which point is the first that is wrong *given its own inputs*? report.guilty lists them.",
           "mlp is right and output is wrong. One function adds mlp to the residual.",
           "Subtract the residual from output and divide by mlp. The quotient is a whole number. Which?"),
    false_repairs=({"DecoderLayer.forward": halved}, {"DecoderLayer.forward": divided}),
)
