"""Two runs compared: bit for bit, in every way that an engine has; token by token, after another run's beginnings."""

from collections.abc import Sequence

import torch

from tplab.align import align
from tplab.cache import blocks_needed
from tplab.checkpoint import Checkpoint
from tplab.llm import LLM, SamplingParams

_PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=20)
_MOST = 16
# How many prompts an engine gets at a time, one after the other; the last time they are asked is looked at.
_TURNS = {"alone": (1,), "in pairs": (2,), "all at once": (_MOST,)}


def bits(ckpt: Checkpoint, prompts: Sequence[Sequence[int]], ranks: int, dtype: str, *, batch_invariant: bool = True
         ) -> dict[str, list]:
    """``{way: the log probabilities of each prompt's tokens}``, on logical ranks; at most 16 prompts, of five
    tokens at least."""
    few = sum(blocks_needed(len(ids) + _PARAMS.max_tokens - 1, 4) for ids in prompts) - 1  # one less than all need
    engines = (({}, _TURNS), ({"max_num_batched_tokens": 7}, {"in chunks of 7": (_MOST,)}),
               ({"num_blocks": few}, {"preempted": (_MOST,)}),
               ({"enable_prefix_caching": True}, {"prefix found": (_MOST, _MOST)}))
    by_way = {}
    for options, ways in engines:
        with LLM(ckpt, ranks, dtype, batch_invariant=batch_invariant, logical=True, block_size=4,
                 max_model_len=max(map(len, prompts)) + _PARAMS.max_tokens,
                 **{"enable_prefix_caching": False} | options) as llm:
            for way, turns in ways.items():
                for at_a_time in turns:
                    outputs = [output for first in range(0, len(prompts), at_a_time) for output in llm.generate(
                        [list(ids) for ids in prompts[first:first + at_a_time]], _PARAMS, use_tqdm=False)]
                assert way != "prefix found" or all(output.metrics.prefix_hit_tokens for output in outputs)
                assert way != "preempted" or any(output.metrics.preemptions for output in outputs)
                by_way[way] = [[entry.logprob for token in output.outputs[0].logprobs for entry in token.values()]
                               for output in outputs]
    return by_way


def num_different(first: list, second: list) -> int:
    """How many log probabilities are not the same bits."""
    return sum(a != b for values, others in zip(first, second) for a, b in zip(values, others))


def read_again(ckpt: Checkpoint, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]],
               tensor_parallel_size: int, dtype: str, patches: Sequence = ()) -> torch.Tensor:
    """The logits from which an engine would choose each token of ``texts``, ``[tokens of all texts, vocabulary]``.

    ``texts``: what a run wrote after ``prompts``. ``patches``: as :func:`tplab.align.align` takes them.
    Every row has the same tokens before it in any engine, so a difference at one token changes no later row.
    """
    read = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    report = align(ckpt, read, tensor_parallel_size=tensor_parallel_size, dtype=dtype, patches=patches)
    rows = torch.cat([torch.arange(len(prompt) + len(text)) for prompt, text in zip(prompts, texts)])
    first = torch.tensor([len(prompt) - 1 for prompt, text in zip(prompts, texts) for _ in [*prompt, *text]])
    last = torch.tensor([len(ids) - 1 for ids in read for _ in ids])
    return report.tp_logits[(first <= rows) & (rows < last)]
