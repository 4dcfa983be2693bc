"""Notebooks 03 and 04: where the tokens of a batch stand, and the next one."""

import torch

from tplab.cache import Segment
from tplab.lesson.attempt import Attempt, NotYet, for_each, saying, tensor, whole_numbers
from tplab.lesson.compare import agree
from tplab.lesson.verdict import Setting, at, exercise
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
            _judge(found, starts, counts)

    for_each((([3, 0, 3, 5], [5, 4, 1, 2]), ([6, 0], [1, 1]), ([2 ** 24], [5])), check,
             lambda case: f"{len(case[0])} sequences", shown=("the text's example", ([0, 8, 20], [6, 4, 1])))
    setting.align_in_chunks()


@exercise("my_token_positions", "04", takes="segment", patches=at("tplab.engine.runner.token_positions"),
          place="numbers a sequence's new tokens",
          agreed="on {ranks}, chunks of a prompt and tokens behind it agree with Hugging Face")
def my_token_positions(attempt: Attempt, setting: Setting):
    """A prompt, a chunk, a token; then in the engine."""
    for start, count in ((0, 5), (6, 1), (4, 3), (7, 8)):
        found = attempt(Segment(start, count, list(range(11)), 14))
        with saying(f"{start} tokens are in the cache, {count} {'follow' if count > 1 else 'follows'}: "):
            if isinstance(found, range) and len(found) > 1000:
                raise NotYet(f"yours are {found}, far more than follow")
            if isinstance(found, torch.Tensor | range):
                found = [*found] if isinstance(found, range) else found.tolist()
            _judge(torch.tensor(whole_numbers(found, "or a range of them"), dtype=torch.long), [start], [count])
    setting.align_in_chunks()


def _judge(found: torch.Tensor, starts: list[int], counts: list[int]) -> None:
    total, each = sum(counts), [*zip(starts, counts)]
    right = _laid_out(each)
    yours = f"yours are {found.tolist()}, and {right.tolist()} are right"
    agree(found, right, {f"{yours}: {says}": way for says, way in {
        "the rows are counted through, as if all were one sequence" if len(starts) > 1 else
        "counted from 0 again: where does the first of them stand?": (torch.arange(total), *[
            torch.arange(total) + starts[0]] * (len(starts) > 1)),
        "every sequence begins at 0: what has it in the cache already?": _laid_out([(0, count) for count in counts]),
        "one too little: n tokens are at 0 to n - 1": right - 1, "one too far: n tokens are at 0 to n - 1": right + 1,
    }.items()}, yours, within=1e-9)


def _laid_out(each: list[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + count) for start, count in each])
