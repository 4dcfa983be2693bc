"""The lab's own engine as a recorded one: `tplab/record.py` beside it, nothing of its trace points."""

import torch

from tplab.model import NoCache, load_model
from tplab.model.attention import AttentionBatch, causal_mask
from tplab.patch import applied
from tplab.ranks import logical_ranks, rank
from tplab.record import record
from tplab.shard import ShardPlan


class Remembering:
    """The context of a call about one sequence: what earlier calls computed comes first."""

    def __init__(self, past: dict, start: int, count: int):
        self.past, self.start, self.lengths = past, start, [(count, start + count)]

    def batches(self, layer, k, v):
        old = self.past.get(layer, (k[:0], v[:0]))
        k, v = self.past[layer] = [torch.cat(pair) for pair in zip(old, (k, v))]
        mask = causal_mask(torch.arange(self.start, len(k))[None], len(k))
        yield AttentionBatch(slice(None), *(x.transpose(0, 1)[None] for x in (k, v)), mask)


def record_lab(folder, ckpt, prompts, tp=2, dtype=torch.float32, patches=(), parameters=False,
               watch=lambda rec, model: rec.watch(model), enable_expert_parallel=False, decoded=0):
    """Forward passes of the lab's engine, recorded into ``folder``: one over all prompts; or if the last ``decoded``
    tokens of each come one by one, prompt after prompt."""
    config = ckpt.config
    plan = ShardPlan.from_config(config, tp, enable_expert_parallel=enable_expert_parallel)

    def on_rank():
        with torch.inference_mode(), record(folder, rank=rank(), world_size=tp) as rec:
            model = load_model(ckpt, plan, dtype)
            watch(rec, model)
            if parameters:
                rec.parameters(model)

            def call(ids, positions, context, *sequences):
                ids, positions = torch.tensor(ids), torch.tensor(positions)
                rec.inputs(ids, positions, *sequences)
                logits = model.compute_logits(model(ids, positions, context))
                if config.logits_scaling != 1 or config.final_logit_softcapping:  # no module gives them
                    rec.tensor("logits", logits)
            if not decoded:
                call(sum(prompts, []), [p for prompt in prompts for p in range(len(prompt))],
                     NoCache([len(prompt) for prompt in prompts]))
            for number, prompt in enumerate(prompts if decoded else ()):
                past, ends = {}, [0, *range(len(prompt) - decoded, len(prompt) + 1)]
                for start, end in zip(ends, ends[1:]):
                    call(prompt[start:end], [*range(start, end)], Remembering(past, start, end - start),
                         [number] * (end - start))

    with applied(*patches):
        logical_ranks(tp, on_rank)
    return folder
