"""Notebook 12: a mixture of experts beside Hugging Face, what its routers choose, and what a rank reads for that.

:func:`tplab.align.align` refuses these models: it has no points inside of experts. Here the points around them are
compared, on any plan.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from tplab.align.gather import trace_on_rank, whole_point
from tplab.align.points import OUTER, layout
from tplab.align.recording import Shard
from tplab.align.reference import hf_model
from tplab.align.report import AlignReport, Evidence, compare
from tplab.align.run import check_prompts
from tplab.checkpoint import Checkpoint
from tplab.model.dtypes import parse_dtype
from tplab.model.experts import routed_by
from tplab.patch import Patch, applied
from tplab.pool import shared_pool
from tplab.ranks import all_reduce, logical_ranks
from tplab.shard import ShardPlan

AROUND = ("o_proj", "post_norm", "mlp", "output")  # of a layer: into and out of the experts, in their order


def beside_hugging_face(ckpt: Checkpoint, prompt: str | Sequence[int], *, tensor_parallel_size: int = 2,
                        dtype: str | torch.dtype = "float32", enable_expert_parallel: bool = False, patches=()
                        ) -> AlignReport:
    """One prompt through Hugging Face and through the ranks, compared at the ends and at four points of each layer.

        >>> broken = beside_hugging_face(ckpt, prompt, enable_expert_parallel=True, patches=[global_for_local])
    """
    dtype, ids = parse_dtype(dtype), check_prompts(ckpt, prompt)
    with applied(*patches):
        plan = ShardPlan.from_config(ckpt.config, tensor_parallel_size, enable_expert_parallel=enable_expert_parallel)
        traces = shared_pool(tensor_parallel_size).run(trace_on_rank, ckpt, plan, dtype, ids)
    theirs, points, evidence = _hugging_faces(hf_model(ckpt, dtype), ids[0]), [], {}
    for name, right in theirs.items():
        shards = [Shard(trace.points[name], layout(name), shard.vocab if name == "logits" else ())
                  for trace, shard in zip(traces, plan.ranks)]
        ours, spread, _ = whole_point(name, shards)
        points.append(compare(name, ours, right, spread, dtype))
        if name in OUTER:
            evidence[name] = Evidence(ours, right, [shard.tensor for shard in shards])
    return AlignReport(ckpt.name, plan, dtype, ids, points, evidence, checkpoint=ckpt,
                       op_logs=[trace.op_log for trace in traces], load_stats=[trace.load_stats for trace in traces])


def _hugging_faces(model, ids: list[int]) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors at these points, ``[tokens, …]`` each, in the order of the forward pass."""
    found = {}

    def first(value) -> torch.Tensor:
        value = value[0] if isinstance(value, tuple) else value
        return value.reshape(-1, value.shape[-1])

    with ExitStack() as undo, torch.inference_mode():
        def after(module, name):
            undo.callback(module.register_forward_hook(
                lambda module, args, output: found.update({name: first(output)})).remove)

        after(model.model.embed_tokens, "embed")
        for number, layer in enumerate(model.model.layers):
            at = f"layers.{number}."
            after(layer.self_attn, at + "o_proj")
            undo.callback(layer.mlp.register_forward_pre_hook(
                lambda module, args, name=at + "post_norm": found.update({name: first(args)})).remove)
            after(layer.mlp, at + "mlp"), after(layer, at + "output")
        after(model.model.norm, "norm")
        found["logits"] = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return found


def not_renormalised(logits, top_k, renormalize):
    weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    return weights, ids                                       # whatever renormalize says


def global_for_local(self, x, weights, ids) -> torch.Tensor:
    partial = torch.zeros_like(x)
    for expert, mlp in enumerate(self.values()):              # counted on this rank, from 0 ...
        place, rows = torch.where(ids.T == expert)            # ... and compared with ids of the whole model
        if len(rows):
            weighted = mlp.partial(x[rows]) * weights[rows, place, None]
            partial.index_add_(0, rows, weighted.to(partial.dtype))
    return partial


def reduced_twice(tensor: torch.Tensor) -> torch.Tensor:
    return all_reduce(all_reduce(tensor))                     # one inside of the experts, one behind them


def own_heads(self, q_norm, k_norm, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def normed(norm, x, heads):
        mean = x.pow(2).mean((1, 2), keepdim=True)            # of the heads that are here
        own = norm.weight.view(-1, x.shape[-1])[heads.start:heads.stop]
        return own * (x * torch.rsqrt(mean + norm.eps))

    return normed(q_norm, q, self.shard.q_heads), normed(k_norm, k, self.shard.kv_heads)


OWN_HEADS = Patch("tplab.model.attention.FullWidthNorm.__call__", own_heads)
MISTAKES = {  # of three engines, in the order in which the notebook meets them: each a patch
    "A": Patch("tplab.model.experts.softmax_then_top_k", not_renormalised),
    "B": Patch("tplab.model.experts.FusedMoE.forward", global_for_local),
    "C": Patch("tplab.model.experts.all_reduce", reduced_twice)}


def chosen(ckpt: Checkpoint, prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """What the routers say of one prompt, or of several: weights and ids of the tokens' experts, both ``[layers,
    tokens, top_k]``."""
    config, ids = ckpt.config, check_prompts(ckpt, prompts)
    ((points, *_),) = logical_ranks(1, trace_on_rank, ckpt, ShardPlan.from_config(config, 1), torch.float32, ids)
    said = [routed_by(config.experts)(points[f"layers.{layer}.router_logits"])
            for layer, sparse in enumerate(config.experts.layers) if sparse]
    weights, experts = (torch.stack(each) for each in zip(*said))
    return weights, experts


def favourites(words: Sequence[str], experts: torch.Tensor, num_experts: int, most: int = 8) -> list[str]:
    """For each expert the words of which most go to it, the most frequent first; ``experts`` is ``[words, top_k]``.

    Counted are whole words, and marks, that stand there three times and more.
    """
    often = {word: count for word, count in Counter(words).items()
             if count > 2 and (not word.strip().isalpha() or word[0] == " " and len(word) > 2)}
    goes = Counter((word, expert) for word, row in zip(words, experts.tolist()) for expert in row)
    lists = []
    for expert in range(num_experts):
        own = [word for word in often if goes[word, expert] > often[word] / 2]
        lists.append(" ".join(word.strip() for word in sorted(own, key=lambda word: -often[word])[:most]))
    return lists


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
    return {f"layer {number}": {f"rank {shard.rank}": 100 * sum((layer == one).double().mean().item()
                                                               for one in shard.experts) for shard in plan.ranks}
            for number, layer in enumerate(experts)}
