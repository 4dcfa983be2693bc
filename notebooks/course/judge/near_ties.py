"""Two runs, token by token: what an engine would choose after every beginning of another run's text."""

from collections.abc import Sequence

import torch

from tplab.align import align
from tplab.checkpoint import Checkpoint


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
