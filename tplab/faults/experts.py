"""Faults of experts and their routers."""

import torch
from torch.nn import functional as F

from tplab.faults.fault import bug, only_if, two_ranks
from tplab.model.trace import point
from tplab.patch import original
from tplab.ranks import all_reduce


def router_softmax_order(logits, top_k, renormalize):
    chosen, ids = torch.topk(logits, top_k, dim=-1)
    return torch.softmax(chosen, dim=-1), ids                 # over the chosen ones alone


def router_not_renormalised(logits, top_k, renormalize):
    weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    return weights, ids                                       # also if renormalize is true


def router_low_precision(self, x):
    weight, bias = (part if part is None else part.bfloat16() for part in (self.weight, self.bias))
    return F.linear(x.bfloat16(), weight, bias).to(x.dtype)   # two experts' scores are easily equal


def all_reduce_twice(t, async_op=False):
    return all_reduce(all_reduce(t))                          # one inside the experts, one after them


def shared_expert_not_reduced(self, x):
    logits = point(f"layers.{self.layer}.router_logits", self.gate(x))
    out = all_reduce(self.experts(x, *self.route(logits)))
    out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert.partial(x)    # a rank's own part of it
    return point(f"layers.{self.layer}.mlp", out)


def experts_off_by_offset(self, x, weights, ids):
    partial = torch.zeros_like(x)
    for expert, mlp in enumerate(self.values()):              # counted on this rank, from 0 ...
        place, rows = torch.where(ids.T == expert)            # ... and compared with ids of the whole model
        if len(rows):
            weighted = mlp.partial(x[rows]) * weights[rows, place, None]
            partial.index_add_(0, rows, weighted.to(partial.dtype))
    return partial


def top_k_of_own_experts(self, x, logits):
    own = torch.tensor([int(expert) for expert in self.experts])
    weights, ids = self.route(logits[:, own])                 # the best of those that are here
    partial = self.experts(x, weights, own[ids])
    if self.shared_expert is not None:
        partial = partial + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert.partial(x)
    return partial


def expert_bias_everywhere(self, x):
    down = self.down_proj
    return F.linear(self.gated(x), down.weight, down.bias)    # each rank's columns with the whole bias


def block_scales_of_other_rows(piece, index, scale, take):
    first = tuple(slice(0, part.stop - part.start) for part in index)          # counted from the rank's own first row
    return original("tplab.checkpoint.reader.widened")(piece, first, scale, take)


_experts = only_if(lambda c: c.experts and c.experts.layers[0], "the first layer has no experts")
_reduced = only_if(lambda c: c.experts and c.experts.layers[0], "the first layer has no experts", two_ranks)
_softmax_first = only_if(lambda c: c.experts.softmax_first and not c.experts.renormalize,
                         "this router's weights are shares among the chosen experts, so they are the same", _experts)
_renormalised = only_if(lambda c: c.experts.softmax_first and c.experts.renormalize,
                        "this router does not renormalise", _experts)
_shared = only_if(lambda c: c.experts.shared_intermediate_size, "there is no shared expert", _reduced)
_alone = only_if(lambda c: not c.experts.shared_intermediate_size,
                 "the shared expert's gate would compute in bfloat16, too", _experts)
_biased = only_if(lambda c: c.experts.bias, "the experts have no biases", _reduced)
_blocks = only_if(lambda c: c.scale_block, "the weights have no scales", two_ranks)


def _enough(config, tensor_parallel_size: int) -> str:
    return _reduced(config, tensor_parallel_size) or (
        "" if config.experts.num_experts // tensor_parallel_size >= config.experts.top_k else
        f"a rank has too few experts to choose {config.experts.top_k} of its own")


_NOTEBOOK = "12_experts"
_EXPERTS = "tplab.model.experts"
_DEALT_OUT = {"enable_expert_parallel": True}

FAULTS = (
    bug(f"{_EXPERTS}.softmax_then_top_k", router_softmax_order, "the router's softmax comes after its top-k",
        "The experts are right, but their weights are too large: they add up to 1 and should not.",
        ("mlxcel's OLMoE took the softmax over the chosen experts: its texts began well and became wrong later.",
         "https://github.com/lablup/mlxcel/pull/391"),
        ("Qwen2-MoE converted to Megatron, which chooses first: weights of 0.25 where some hundredths are right.",
         "https://github.com/QwenLM/Qwen3/issues/687"),
        first_point="layers.0.moe_partial", notebook=_NOTEBOOK, needs=_softmax_first),
    bug(f"{_EXPERTS}.softmax_then_top_k", router_not_renormalised, "the chosen experts' weights are not renormalised",
        "The experts are right, but their weights are too small; the text is nearly right.",
        ("torchtitan's DeepSeek V3 did not divide by the sum; the gradient of a converted checkpoint was far too "
         "large.", "https://github.com/pytorch/torchtitan/issues/1448"),
        first_point="layers.0.moe_partial", notebook=_NOTEBOOK, needs=_renormalised),
    bug("tplab.shard.linear.ReplicatedLinear.forward", router_low_precision, "the router computes in bfloat16",
        "Sometimes a token goes to the third best expert.",
        ("SGLang's Kimi K3 computed the router's logits in bfloat16: one token in twenty got other experts.",
         "https://github.com/sgl-project/sglang/pull/33764"),
        first_point="layers.0.router_logits", notebook=_NOTEBOOK, needs=_alone, below_bfloat16=True),
    bug(f"{_EXPERTS}.all_reduce", all_reduce_twice, "the experts' sum is reduced twice",
        "Correct on one rank; on two, the MLPs count twice.",
        ("vLLM's Aria: the shared expert reduces its part, and the runner reduces the sum again. Right on one rank, "
         "garbage on four.", "https://github.com/vllm-project/vllm/issues/49122"),
        ("vLLM for Gaudi: MiniMax M2 was reduced inside the experts and after them.",
         "https://github.com/vllm-project/vllm-gaudi/pull/1451"),
        first_point="layers.0.mlp", notebook=_NOTEBOOK, needs=_reduced),
    bug(f"{_EXPERTS}.SparseMoeBlock.forward", shared_expert_not_reduced, "the shared expert's part is never reduced",
        "The ranks differ more and more; each has only its part of the shared expert.",
        ("tpu-inference reduced the routed experts and not the shared one: 23.9 % instead of 96.2 % on GSM8K.",
         "https://github.com/vllm-project/tpu-inference/pull/3435"),
        ("The opposite in SGLang: a shared expert that is whole on each rank was added up over all ranks.",
         "https://github.com/sgl-project/sglang/issues/31475"),
        first_point="layers.0.mlp", notebook=_NOTEBOOK, needs=_shared),
    bug(f"{_EXPERTS}.FusedMoE.forward", experts_off_by_offset, "a rank uses global expert ids as its own",
        "Correct on one rank; on two, half of the experts get no tokens, and the others get theirs.",
        ("FlashInfer subtracted a rank's offset twice: zeros from every rank but the first.",
         "https://github.com/flashinfer-ai/flashinfer/issues/3547"),
        ("vLLM for Gaudi discusses whether its kernel takes global or local ids.",
         "https://github.com/vllm-project/vllm-gaudi/pull/1796"),
        first_point="layers.0.moe_partial", notebook=_NOTEBOOK, needs=_reduced, options=_DEALT_OUT),
    bug(f"{_EXPERTS}.SparseMoeBlock.partial", top_k_of_own_experts, "each rank chooses the best of its own experts",
        "Correct on one rank; on two, a token goes to twice as many experts.",
        ("mesh-llm distributed experts over nodes, and each node chose among its own; the text got worse with every "
         "node.", "https://github.com/Mesh-LLM/mesh-llm/issues/361"),
        first_point="layers.0.moe_partial", notebook=_NOTEBOOK, needs=_enough, options=_DEALT_OUT),
    bug("tplab.model.mlp.GatedMLP.partial", expert_bias_everywhere, "every rank adds the experts' biases",
        "Correct on one rank; the text gets worse with every further rank.",
        ("torchtitan's gpt-oss: every rank added the whole bias of the experts before the sum.",
         "https://github.com/pytorch/torchtitan/pull/4245"),
        first_point="layers.0.moe_partial", notebook=_NOTEBOOK, needs=_biased),
    bug("tplab.checkpoint.reader.widened", block_scales_of_other_rows, "each rank has the scales of the first blocks",
        "Rank 0 is right; the other ranks' rows are too large or too small, block by block.",
        ("vLLM rounds the offset and the size of a part's blocks up separately, so a part can get another's scales.",
         "https://github.com/vllm-project/vllm/issues/52997"),
        first_point="layers.0.q", notebook="07_sharded_loading", needs=_blocks),
)
