"""A case file. It holds the solution: do not read on if you want to solve the case."""

import torch

from course.cases.case_file import Bug, CaseFile, Trial, engines_own
from tplab.shard import ShardPlan
from tplab.shard.linear import column_shard

my_load, my_mask = engines_own("QKVParallelLinear.load"), engines_own("causal_mask")


def load(self, parameter, *sources):
    parts = [column_shard(source, rows) for source, rows in zip(sources, self.ranges, strict=True)]
    if len(parts[1]) < len(parts[0]):  # grouped queries: files in Meta's order hold the rows of a key in pairs
        pairs = parts[1].unflatten(0, (-1, self.head_size // 2, 2))
        parts[1] = pairs.transpose(1, 2).reshape(parts[1].shape)
    getattr(self, parameter).data.copy_(torch.cat(parts))


def causal_mask(positions, keys):
    newest = positions[0]  # of the batch
    mask = torch.arange(keys, device=positions.device) > newest[:, None]
    return mask.expand(len(positions), 1, *mask.shape)


def longest_mask(positions, keys):
    newest = positions.max(0).values  # so that no sequence of the batch sees too little
    mask = torch.arange(keys, device=positions.device) > newest[:, None]
    return mask.expand(len(positions), 1, *mask.shape)


def mask_of_a_few(positions, keys):
    return (causal_mask if len(positions) > 3 else my_mask)(positions, keys)


def trials(take):
    return (Trial("three prompts of unlike lengths at once, the last tokens one by one",
                  [take(24), take(30), take(17)], 6),
            Trial("one prompt, read at once", [take(26)]),
            Trial("two prompts at once, the longer one first", [take(33), take(12)], 5))


def grouped(config, tensor_parallel_size):
    plan = ShardPlan.from_config(config, tensor_parallel_size)
    if any(len(shard.kv_heads) < len(shard.q_heads) for shard in plan.ranks):
        return ""
    return "no rank has fewer KV heads than query heads"


CASE = CaseFile(
    title="Nonsense since the upgrade; after our hotfix, batches are still wrong",
    report="Since the upgrade every answer is nonsense, with one rank or with {ranks}. A colleague found something in "
           "the loader, and one prompt at a time was right again. Then the evaluation ran, which sends three prompts "
           "at a time, and most of those answers differ from what the same prompt gives alone. We rolled the hotfix "
           "back, because we do not understand it. This is the engine without it.",
    trials=trials, needs=grouped,
    bugs=(Bug("QKVParallelLinear.load", load,
              "weights are stored in another order than the checkpoint's", "rope_permuted_rows"),
          Bug("causal_mask", causal_mask, "one sequence's length is used for the whole batch",
              "mask_of_another_row")),
    why={
        "Two causes: one makes every answer wrong, and in the texts it hides a second one, which makes only batches "
        "wrong.": "",
        "One cause: keys and values are exchanged when they are loaded, and batches show it more often.":
            "the values are right: only k, and what is computed from it, is wrong",
        "Two causes: keys are rotated in pairs of neighbours, and a batch reads another sequence's blocks.":
            "q_rope and k_rope are right, given their inputs q and k: k itself is wrong",
        "The batch reads another sequence's blocks, because block tables are sent in the wrong order.":
            "the block tables of the ranks are the scheduler's, and each sequence reads its own keys",
    },
    elsewhere={
        "MergedColumnParallelLinear.load": "it is right, and in this engine q, k and v do not go through it",
        "TensorParallelAttention.apply_rope": "k_rope is right, given k",
        "PagedContext._slots": "each sequence reads its own slots",
        "TensorParallelAttention.attend_all": "it uses the mask that it gets",
    },
    hints=("There are two bugs, and in the texts the larger one hides the other. First align one prompt, then a "
           "batch along the decode path.",
           "The first: layers.0.k is wrong and v is right. Sort the numbers of one key: are they the right ones?",
           "The second: with the first one repaired, attn is wrong in the decoded rows of every prompt but the "
           "first."),
    false_repairs=({"QKVParallelLinear.load": my_load},
                   *({"QKVParallelLinear.load": my_load, "causal_mask": wrong} for wrong in (
                       longest_mask, mask_of_a_few))),
)
