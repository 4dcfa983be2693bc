"""Notebook 03: where the tokens of a batch stand."""

import torch

from course.judge.attempt import Attempt, NotYet, for_each, saying, tensor
from course.judge.compare import agree
from course.judge.verdict import Setting, exercise
from tplab.patch import Patch, original


def _stand(answer) -> list[Patch]:
    target = "tplab.model.decoder.TensorParallelCausalLM.forward"

    def forward(self, input_ids, positions, context):
        starts, counts = [s.start for s in context.segments], [s.count for s in context.segments]
        return original(target)(self, input_ids, answer(starts, counts), context)

    return [Patch(target, forward)]


@exercise("my_positions", "03", takes="starts, counts", place="says where each token stands", patches=_stand,
          agreed="on {ranks}, prompts read in chunks and beside each other agree with Hugging Face")
def my_positions(attempt: Attempt, setting: Setting):
    """A chunk, a prompt and decoding tokens in one batch; then under the engine, in chunks of 5 tokens."""
    def check(case):
        starts, counts = case
        found = attempt(starts, counts)
        with saying(f"starts {starts}, counts {counts}: "):
            shape = found.shape if isinstance(found, torch.Tensor) and found.dim() == 1 else [sum(counts)]
            tensor(found, "tokens", shape)
            if found.dtype not in (torch.int64, torch.int32):
                raise NotYet(f"it returns {found.dtype}; positions are whole numbers, torch.int64")
            right = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts)])
            agree(found, right, {}, f"yours are {found.tolist()}, and {right.tolist()} are right", within=1e-9)

    for_each((([3, 0, 3, 5], [5, 4, 1, 2]), ([6, 0], [1, 1]), ([2 ** 24], [5])), check,
             lambda case: f"{len(case[0])} sequences", shown=("the text's example", ([0, 8, 20], [6, 4, 1])))
    setting.align_in_chunks()
