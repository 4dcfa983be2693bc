"""A case file; reading on spoils it."""

import torch

from tplab.faults.case_file import Bug, CaseFile, Trial
from tplab.shard.linear import column_shard


def load(self, parameter, *sources):
    parts = [column_shard(source, rows) for source, rows in zip(sources, self.ranges, strict=True)]
    if len(parts) == 2:  # as the fused kernel wants them
        parts.reverse()
    getattr(self, parameter).data.copy_(torch.cat(parts))


def my_load(self, parameter, *sources):
    parts = [column_shard(source, rows) for source, rows in zip(sources, self.ranges, strict=True)]
    getattr(self, parameter).data.copy_(torch.cat(parts))  # in the order in which split takes them apart


def whole(self, parameter, *sources):
    parts = [source[:][rows.start:rows.stop] for source, rows in zip(sources, self.ranges, strict=True)]
    getattr(self, parameter).data.copy_(torch.cat(parts))


def long_first(self, parameter, *sources):
    parts = [column_shard(source, rows) for source, rows in zip(sources, self.ranges, strict=True)]
    if len(parts) == 2 and len(parts[0]) % 2:  # the kernel is for even sizes only
        parts.reverse()
    getattr(self, parameter).data.copy_(torch.cat(parts[::-1] if len(parts) == 2 else parts))


def trials(take):
    return (Trial("a prompt of 26 tokens", [take(26)]),
            Trial("two prompts of which five tokens come one by one", [take(19), take(14)], 5))


CASE = CaseFile(
    title="Our converter's checkpoint loads without a complaint and talks like a stranger",
    report="The loader was rewritten for the fused kernels. All names are found, all shapes fit, nothing is missing "
           "and nothing unexpected. The text has the right language and the wrong everything else, the same with one "
           "rank as with {ranks}. We compared the checkpoint's checksum with the hub's: it is the right file.",
    trials=trials,
    bugs=(Bug("MergedColumnParallelLinear.load", load, my_load,
              "weights are put into another order than the checkpoint's", "gate_up_order"),),
    why={
        "Of two merged projections the second is stored first, and the split takes the first for the gate: the "
        "activation falls on up.": "",
        "The merged projections are cut as one block, so a rank has gate's rows where up's belong.":
            "then one rank would be right, and it is wrong on one rank too",
        "q, k and v are stacked in another order than they are split.":
            "q, k and v are right; only mlp_act, and what is made of it, is guilty",
        "The activation is another one than the checkpoint's.":
            "act(up) × gate fits to the last digit; another activation of gate does not",
    },
    elsewhere={
        "TensorParallelMLP.forward": "it takes gate and up in the order [gate|up] in which the weights should stand",
        "MergedColumnParallelLinear.split": "it cuts where the sizes say; what stands there is not its doing",
        "QKVParallelLinear.load": "q, k and v are right",
    },
    hints=((1, "The first guilty point is inside the MLP, so q, k, v, attention and every norm are right."),
           (2, "mlp_act is act(gate) × up. Compute act(up) × gate from the same input, and compare."),
           (2, "with case.broken(): reassemble(ckpt) says which tensors are not the checkpoint's, row by row.")),
    false_repairs=({"MergedColumnParallelLinear.load": whole}, {"MergedColumnParallelLinear.load": long_first}),
    production="A rank that reads whole tensors and cuts afterwards reads as many times the checkpoint as there are "
               "ranks, and holds each tensor twice while it loads: the model that just fits a card does not load.",
    story="Same with one rank: no sharding. One run, and mlp_act is the first guilty point. Three tensors make it: "
          "gate, up and the activation; both halves of the fused weight are there, so exchange them, and every digit "
          "fits. Now which side is wrong, the one that writes or the one that reads? reassemble compares with the "
          "file: gate_proj and up_proj differ on every rank. So it is the loader, and it says why: *as the fused "
          "kernel wants them*. A finite, plausible result is what makes this one come back: both halves have the "
          "same shape.",
    sources=(("nntrainer: its converter writes up before gate, a branch read gate first; the output was finite and "
              "plausible, and had been wrong more than once before a comparison with the reference showed 1e-2 "
              "instead of 3e-5.", "https://github.com/nntrainer/nntrainer/pull/4194"),
             ("tinker-cookbook: what belonged to up was merged into gate's rows, for six models; the index is now "
              "taken from the original name.", "https://github.com/thinking-machines-lab/tinker-cookbook/pull/459")),
)
