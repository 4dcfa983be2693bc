"""A case file; reading on spoils it."""

import torch

from tplab.faults.case_file import Bug, CaseFile, Trial
from tplab.faults.fault import two_ranks
from tplab.ranks import rank
from tplab.shard.linear import column_shard


def channel_scales(weight):
    return weight.float().abs().amax(1, keepdim=True).to(weight.dtype)  # one for each output, as 8-bit files hold them


def merged_shard(sources, ranges):
    parts = []
    for source, rows in zip(sources, ranges, strict=True):
        part = column_shard(source, rows)
        if part.dim() == 2:
            scales = channel_scales(source[:len(rows)])
            part = part / channel_scales(part) * scales
        parts.append(part)
    return torch.cat(parts)


def my_shard(sources, ranges):
    # A scale belongs to its row: both are cut at the same place, and then they cancel.
    return torch.cat([column_shard(source, rows) for source, rows in zip(sources, ranges, strict=True)])


def by_rank(sources, ranges):
    parts = []
    for source, rows in zip(sources, ranges, strict=True):
        part, start = column_shard(source, rows), rank() * len(rows)
        if part.dim() == 2 and start != rows.start:
            part = part / channel_scales(part) * channel_scales(source[:len(rows)])
        parts.append(part)
    return torch.cat(parts)


def trials(take):
    return (Trial("a prompt of 26 tokens", [take(26)]),
            Trial("two prompts at once, of 31 and 7 tokens", [take(31), take(7)]))


CASE = CaseFile(
    title="The 8-bit build: perfect on one card, off on two",
    report="We load weights through the 8-bit path now: divided by one scale for each output channel, multiplied "
           "with it again. On one rank every logit is what it was. With {ranks} ranks the text is fluent and wrong. "
           "Shapes are right, so are the dtypes; rank 0 alone passes our check of weights, and we only ever ran it "
           "there.",
    trials=trials, needs=two_ranks,
    bugs=(Bug("merged_shard", merged_shard, my_shard, "a rank takes what belongs to rank 0", "channel_scales"),),
    why={
        "The weight is cut at the rank's rows and its scales at the first ones, so each row is multiplied with another "
        "row's scale.": "",
        "Every rank loads the first rows of the weights.":
            "then a rank's q would be rank 0's; it is its own, each feature times a number",
        "The scales are applied twice.":
            "then rank 0, and one rank alone, would be wrong too",
        "Eight bits are too few for these weights.":
            "no digit is lost: divided by the right scale and multiplied with it, every row is the checkpoint's",
    },
    elsewhere={
        "column_shard": "the rows are right; try: each feature is the right one times a number",
        "QKVParallelLinear.split_heads": "it cuts at the heads, and each head is where it belongs",
        "RowParallelLinear.load": "o_proj and down_proj are right: every partial fits its input",
    },
    hints=((1, "report.local tells the guilty ranks of a point: which of them is right?"),
           (2, "On a guilty rank divide q by what it should be, feature by feature: the quotient is the same for all "
               "tokens."),
           (2, "The quotients are those of the rows' largest weights: the first rows', by this rank's own.")),
    false_repairs=({"merged_shard": by_rank},),
    production="Where every rank has as many rows as the next, the offset is the rank times their number. Nine heads "
               "over two ranks, or a KV head on two of them, are not cut like that: it passes on the model that you "
               "tested.",
    story="Right on one rank and on rank 0: an offset. layers.0.q is the first guilty point, on all ranks but 0; and "
          "q is not noise, its features are in their places, each of them too large or too small by a factor that no "
          "token changes. A factor for each output is a scale for each output. The 8-bit path cuts the weight at the "
          "rank's rows and reads scales from row 0. Whatever is stored for each row is cut with the rows, by the "
          "same range: not by rank times size, which is the same thing only where everything divides.",
    sources=(("LightX2V skipped the cut for every tensor of one dimension, to spare a scalar, and so left biases and "
              "scales of column-parallel layers whole; merged: cut them with their rows.",
              "https://github.com/ModelTC/LightX2V/pull/1453"),
             ("vLLM's GGUF plugin: two of four loaders took the rank from an argument that nobody gave, 0 by "
              "default, so every rank held the first shard, with the right shape.",
              "https://github.com/vllm-project/vllm-gguf-plugin/issues/103")),
)
