"""A case file. It holds the solution: do not read on if you want to solve the case."""

import torch

from course.cases.case_file import Bug, CaseFile, Trial, engines_own

my_rope = engines_own("TensorParallelAttention.apply_rope")


def apply_rope(self, q, k, cos, sin):
    size = cos.shape[-1]
    if len(q) == 1:  # one new token: the function for small batches
        size //= 2
        cos, sin = (table[..., :size // 2].repeat(1, 1, 2) for table in (cos, sin))
    turned = self.rotate(*(x[..., :size].transpose(0, 1)[None] for x in (q, k)), cos, sin)
    return tuple(torch.cat([x[0].transpose(0, 1), whole[..., size:]], -1) for x, whole in zip(turned, (q, k)))


def keys_only(self, q, k, cos, sin):
    return apply_rope(self, q, k, cos, sin)[0], my_rope(self, q, k, cos, sin)[1]


def trials(take):
    return (Trial("one prompt, the last ten tokens one by one", [take(34)], 10),
            Trial("another prompt, the last six tokens one by one", [take(21)], 6),
            Trial("three prompts at once, the last tokens one by one", [take(18), take(25), take(11)], 4))


def plain_rope(config, tensor_parallel_size):
    rope = config.hf.rope_parameters.get("rope_type")
    if rope != "default" or config.head_dim % 4 or config.partial_rotary_factor != 1:
        return "half of this model's heads cannot be rotated in the usual way"
    return ""


CASE = CaseFile(
    title="Wrong only when a single user is left",
    report="Under load our answers are the same as with transformers. At night, when a single user is left, the first "
           "word is right and the rest is nearly right: fluent, with wrong names. When a second user joins, the next "
           "few words of both are right. It is the same on one rank and on {ranks}. We compared a forward pass over "
           "the whole text, also for one user, and every number is right.",
    trials=trials, needs=plain_rope,
    bugs=(Bug("TensorParallelAttention.apply_rope", apply_rope, "a special case is treated wrongly",
              "rope_partial"),),
    why={
        "A token that is computed alone is rotated in only half of each head, although all of it must be rotated.": "",
        "A token that is computed alone gets another position than one in a batch.":
            "no position explains it: one half of each head is not rotated at all",
        "The cache of a single sequence loses its newest key.":
            "the inputs of attention are already wrong: q_rope and k_rope of the new token",
        "Cosines and sines of a single position are broadcast over the heads.":
            "then heads would be rotated by different angles; all of them are rotated alike",
    },
    elsewhere={
        "token_positions": "the positions are right, also for a token alone",
        "Rotary.__call__": "cos and sin are right; their use is wrong",
        "PagedContext.batches": "the keys that it gets are already wrong",
        "Scheduler.schedule": "the number of sequences in a step decides whether the bug shows, but the scheduling is "
                              "right",
    },
    not_what={"a part is used as if it were the whole": "a part of each head is not rotated, and only in some steps: "
                                                       "what is special in them?"},
    hints=("align does not show it: use align_decode, with one prompt, then with two.",
           "In which of its numbers does the new token's q_rope differ from the right one?",
           "Which function does not get the batch as an argument, but can find out its size?"),
    false_repairs=({"TensorParallelAttention.apply_rope": keys_only},),
)
