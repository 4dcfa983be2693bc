"""A case file. It holds the solution: do not read on if you want to solve the case."""

import torch

from course.cases.case_file import Bug, CaseFile, Trial
from tplab.shard.linear import column_shard


def load(self, parameter, *sources):
    parts = [column_shard(source, rows) for source, rows in zip(sources, self.ranges, strict=True)]
    if len(parts) == 2:  # as the fused kernel wants them
        parts.reverse()
    getattr(self, parameter).data.copy_(torch.cat(parts))


def whole(self, parameter, *sources):
    parts = [source[:][rows.start:rows.stop] for source, rows in zip(sources, self.ranges, strict=True)]
    getattr(self, parameter).data.copy_(torch.cat(parts))


def long_first(self, parameter, *sources):
    parts = [column_shard(source, rows) for source, rows in zip(sources, self.ranges, strict=True)]
    if len(parts) == 2 and len(parts[0]) % 2:  # the kernel is for even sizes only
        parts.reverse()
    getattr(self, parameter).data.copy_(torch.cat(parts[::-1] if len(parts) == 2 else parts))


def exchanged(self, x):
    up, gate = self.gate_up_proj.split(self.gate_up_proj(x))
    return self.act(gate) * up


def trials(take):
    return (Trial("a prompt of 26 tokens", [take(26)]),
            Trial("two prompts, the last five tokens of each one by one", [take(19), take(14)], 5))


CASE = CaseFile(
    title="A converted checkpoint loads without an error and writes nonsense",
    report="The loader was rewritten for the fused kernels. All names are found, all shapes fit, nothing is missing "
           "and nothing unexpected. It writes English words and no sentence, the same with one rank as with "
           "{ranks}. We compared the checkpoint's checksum with the hub's: it is the right file.",
    trials=trials,
    bugs=(Bug("MergedColumnParallelLinear.load", load,
              "weights are stored in another order than the checkpoint's", "gate_up_order"),),
    why={
        "Of two merged projections the second is stored first, and the split uses the first as the gate: the "
        "activation is applied to up.": "",
        "The merged projections are cut as one block, so a rank has rows of gate in the places of up's rows.":
            "then one rank would be right, and it is wrong on one rank, too",
        "q, k and v are stacked in another order than they are split.":
            "q, k and v are right; only mlp_act and what is computed from it are wrong",
        "The activation is not the checkpoint's.":
            "act(up) × gate fits to the last digit; another activation of gate does not",
    },
    elsewhere={
        "GatedMLP.gated": "it takes gate first and then up, which is right; the weights that it gets are not",
        "MergedColumnParallelLinear.split": "it cuts at the right sizes; the rows themselves are in the wrong order",
        "QKVParallelLinear.load": "q, k and v are right",
    },
    hints=("The first guilty point is inside the MLP, so q, k, v, attention and every norm are right.",
           "mlp_act is act(gate) × up. Compute act(up) × gate from the same input, and compare.",
           "with case.broken(): reassemble(ckpt) says which tensors differ from the checkpoint, row by row."),
    false_repairs=({"MergedColumnParallelLinear.load": whole}, {"MergedColumnParallelLinear.load": long_first},
                   {"GatedMLP.gated": exchanged}),
)
