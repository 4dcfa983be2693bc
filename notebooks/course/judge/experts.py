"""Notebook 12: what the routers of a mixture of experts choose, and what a rank reads for that."""

import torch

from tplab.align.gather import trace_on_rank
from tplab.align.run import check_prompts
from tplab.checkpoint import Checkpoint
from tplab.model.experts import routed_by
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

# Notebook 12's engines, whose bugs it asks for.
BUGS = {"A": "router_not_renormalised", "B": "experts_off_by_offset", "C": "all_reduce_twice"}


def chosen(ckpt: Checkpoint, prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """What the routers say of one prompt, or of several: weights and ids of the tokens' experts, both ``[layers,
    tokens, top_k]``."""
    config, ids = ckpt.config, check_prompts(ckpt, prompts)
    ((points, *_),) = logical_ranks(1, trace_on_rank, ckpt, ShardPlan.from_config(config, 1), torch.float32, ids)
    choices = [routed_by(config.experts)(points[f"layers.{layer}.router_logits"])
               for layer, sparse in enumerate(config.experts.layers) if sparse]
    weights, experts = (torch.stack(each) for each in zip(*choices))
    return weights, experts


def read_in_steps(config, plan: ShardPlan, experts: torch.Tensor, rows: int, itemsize: int) -> tuple[float, float]:
    """Bytes of experts that are read in a step of so many rows, as a mean over steps: by a rank (a mean over them), and
    by the busiest, for which all others wait in every layer.

    ``experts``: what each token chose, ``[layers, tokens, top_k]``. In a step, an expert is read once.
    """
    mean = busiest = 0.0
    for layer in experts:
        steps = [set(step.flatten().tolist()) for step in layer.split(rows)]
        for asked in steps:
            read = [len(asked & set(shard.experts)) * 3 * config.hidden_size * len(shard.expert_mlp) * itemsize
                    for shard in plan.ranks]
            mean, busiest = mean + sum(read) / len(read) / len(steps), busiest + max(read) / len(steps)
    return mean, busiest


def rows_of_ranks(plan: ShardPlan, experts: torch.Tensor) -> dict[str, dict[str, float]]:
    """``{layer: {rank: how many percent of the rows that go through whole experts are its}}``."""
    return {f"layer {number}": {f"rank {shard.rank}": 100 * sum((layer == expert).double().mean().item()
                                                               for expert in shard.experts) for shard in plan.ranks}
            for number, layer in enumerate(experts)}
