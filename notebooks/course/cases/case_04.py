"""A case file. It holds the solution: do not read on if you want to solve the case."""

import torch

from course.cases.case_file import Bug, CaseFile, Trial
from course.judge.exercise import edited
from tplab.faults.fault import two_ranks
from tplab.ranks import rank
from tplab.shard.linear import column_shard


def merged_shard(sources, ranges):
    def channel_scales(weight):
        return weight.float().abs().amax(1, keepdim=True).to(weight.dtype)  # one for each output, as in 8-bit files

    parts = []
    for source, rows in zip(sources, ranges, strict=True):
        part = column_shard(source, rows)
        if part.dim() == 2:
            scales = channel_scales(source[:len(rows)])
            part = part / channel_scales(part) * scales
        parts.append(part)
    return torch.cat(parts)


by_rank = edited(
    merged_shard, "part.dim() == 2: -> part.dim() == 2 and rows.start != rank() * len(rows):", rank=rank)


def trials(take):
    return (Trial("a prompt of 26 tokens", [take(26)]),
            Trial("two prompts at once, of 31 and 7 tokens", [take(31), take(7)]))


CASE = CaseFile(
    title="The 8-bit build: right on one card, wrong on two",
    report="We load weights through the 8-bit path now: each output channel is divided by its scale and multiplied by "
           "it again. On one rank every logit is the same as before. With {ranks} ranks the text is fluent and wrong. "
           "Shapes and dtypes are right; our check of the weights passes on rank 0, and we only ever ran it there.",
    trials=trials, needs=two_ranks,
    bugs=(Bug("merged_shard", merged_shard, "a rank uses rank 0's data", "channel_scales"),),
    why={
        "The weight is cut at the rank's rows and its scales at the first rows, so each row is multiplied by another "
        "row's scale.": "",
        "Every rank loads the first rows of the weights.":
            "then a rank's q would be rank 0's; it is its own, with each row of the weight multiplied by a number",
        "The scales are applied twice.": "then rank 0 would be wrong, too, and so would a single rank",
        "Eight bits are too few for these weights.":
            "no digit is lost: divided and multiplied by the right scale, every row is the checkpoint's",
    },
    elsewhere={
        "column_shard": "the rows are right: each is the checkpoint's times a number",
        "QKVParallelLinear.split_heads": "it cuts at the heads, and each head is in the right place",
        "RowParallelLinear.load": "o_proj and down_proj are right: every partial fits its input",
    },
    not_what={"a part is used as if it were the whole": "each scale is right, for a row: whose row?"},
    hints=("report.local[\"layers.0.q\"].guilty lists the ranks on which a point is guilty: which rank is right?",
           "On a guilty rank subtract each feature's mean over the tokens from q and from the right q: the biases are "
           "gone. Then divide one by the other: a feature's quotient is the same for all tokens.",
           "Each quotient is a scale of the first rows divided by the scale of this rank's row."),
    false_repairs=({"merged_shard": by_rank},),
)
