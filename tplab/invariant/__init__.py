"""Batch invariance: the same bits for a sequence, whatever is computed beside it and on however many ranks.

A sum of rounded numbers depends on its order, and libraries choose the order by the sizes that they meet. Here a sum is
either exact (see kernels.py) or has one order, which depends on the model alone: what ranks compute is added up along
one binary tree, as in TBIK (https://arxiv.org/abs/2511.17826). For other ways to a fixed order, see
https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference. The rooms below do not depend on this one.
"""

import torch

from tplab.engine.errors import EngineError
from tplab.engine.runner import ModelRunner
from tplab.invariant.model import make_batch_invariant
from tplab.invariant.tree import RANKS


def why_not(config, dtype: torch.dtype, ranks: int) -> str | None:
    """Why a model of this :class:`tplab.checkpoint.ModelConfig` cannot be batch-invariant; None if it can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {str(dtype).removeprefix('torch.')}: it is made for float32 and bfloat16"
    if ranks not in RANKS:
        return f"{ranks} ranks: its sums are made for {', '.join(map(str, RANKS[:-1]))} or {RANKS[-1]}"
    if config.experts is not None:
        return "experts: which rank adds up which of them depends on the number of ranks"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r}: it has silu"
    if capped := [trait for trait in config.traits if trait.startswith("capped")]:
        return capped[0]
    if not config.rope_types.isdisjoint(("dynamic", "longrope")):
        return "a rotation that depends on the prompt's length"
    return None


def refuse_unknown(config, dtype: torch.dtype, ranks: int) -> None:
    """EngineError if ``batch_invariant=True`` cannot be kept for this model."""
    if reason := why_not(config, dtype, ranks):
        raise EngineError(f"batch_invariant=True does not support {reason}")


def make_runner(ckpt, plan, config) -> ModelRunner:
    """On a rank: a loaded runner whose sums have one order."""
    runner = ModelRunner(ckpt, plan, config)
    make_batch_invariant(runner.model)
    return runner
