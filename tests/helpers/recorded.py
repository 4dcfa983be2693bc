"""The lab's own engine as a recorded one: `tplab/record.py` beside it, nothing of its trace points."""

import torch

from tplab.model import NoCache, load_model
from tplab.patch import applied
from tplab.ranks import logical_ranks, rank
from tplab.record import record
from tplab.shard import ShardPlan


def record_lab(folder, ckpt, prompts, tp=2, dtype=torch.float32, patches=(), parameters=False,
               watch=lambda rec, model: rec.watch(model)):
    """One forward pass of the lab's engine over several prompts, recorded into ``folder``."""
    plan = ShardPlan.from_config(ckpt.config, tp)
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])

    def on_rank():
        with torch.inference_mode(), record(folder, rank=rank(), world_size=tp) as rec:
            model = load_model(ckpt, plan, dtype)
            watch(rec, model)
            if parameters:
                rec.parameters(model)
            rec.inputs(ids, positions)
            model.compute_logits(model(ids, positions, NoCache(lengths)))

    with applied(*patches):
        logical_ranks(tp, on_rank)
    return folder
