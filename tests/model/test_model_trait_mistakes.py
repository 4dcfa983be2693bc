"""The comparison with Hugging Face sees what goes wrong with the traits: each mistake moves the logits far out."""

import pytest
import torch
from helpers.trait_models import TRAITS, make_model
from helpers.trait_sweep import hf_logits, our_logits, some_prompts

from tplab.align.floors import bound
from tplab.checkpoint import open_checkpoint
from tplab.patch import Patch, applied, original
from tplab.ranks import all_reduce, logical_ranks, rank
from tplab.shard import ShardPlan

ATTENTION, EXPERTS = "tplab.model.attention", "tplab.model.experts"


def one_too_wide(mask, window):
    return original(f"{ATTENTION}.within_window")(mask, window + 1)


def the_query_not_counted(mask, window):
    return original(f"{ATTENTION}.within_window")(mask, window - 1)


def sinks_of_rank_0(self, parameter, source):
    getattr(self, parameter).data.copy_(source[:len(self.shard.q_heads)])


def no_sinks(scores, sinks):
    return torch.softmax(scores, -1)


def not_capped(x, cap):
    return x


def own_heads_only(self, q_norm, k_norm, q, k):
    """Mean and weight of this rank's part."""
    def own(norm, x, heads):
        wide, d = x.flatten(1).float(), x.shape[-1]
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return (norm.weight[heads.start * d:heads.stop * d] * wide.to(x.dtype)).view(x.shape)
    return own(q_norm, q, self.shard.q_heads), own(k_norm, k, self.shard.kv_heads)


def weight_as_it_is(self, x):
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
    return (wide * self.weight.float()).to(x.dtype)


def rotated_all_the_same(q, k, cos, sin):
    from transformers.models.smollm3.modeling_smollm3 import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, cos, sin)


def halves(model_type):
    return original("tplab.model.rope.rotate")("phi3")


def not_scaled(self, branch):
    return branch


def not_renormalised(logits, top_k, renormalize):
    return original(f"{EXPERTS}.softmax_then_top_k")(logits, top_k, False)


def softmax_over_the_chosen(logits, top_k, renormalize):
    return original(f"{EXPERTS}.top_k_then_softmax")(logits, top_k)


def local_ids(self, x, weights, ids):
    """A rank takes global ids for its own."""
    first = int(next(iter(self)))
    return original(f"{EXPERTS}.FusedMoE.forward")(self, x, weights, ids + first)


def top_k_of_own(self, x, weights, ids):
    """Each rank gives all of a token's weight to the experts that it has."""
    own = sum(ids == int(expert) for expert in self)
    weights = weights * own / (weights * own).sum(-1, keepdim=True).clamp(min=1e-9)
    return original(f"{EXPERTS}.FusedMoE.forward")(self, x, weights, ids)


def bias_on_every_rank(self, x):
    return torch.nn.functional.linear(x, self.weight, self.bias)


def reduced_twice(t, async_op=False):
    return all_reduce(all_reduce(t))


def reduced_on_no_rank(t, async_op=False):
    return t


def shared_on_rank_0(self, x):
    """The shared expert's part of rank 0 alone."""
    found = original("tplab.model.mlp.GatedMLP.partial")(self, x)
    return found if rank() == 0 or self.down_proj.input_size != 17 else torch.zeros_like(found)


MISTAKES = [
    ("window on all layers", False, f"{ATTENTION}.within_window", one_too_wide),
    ("Gemma-3", False, f"{ATTENTION}.within_window", the_query_not_counted),
    ("gpt-oss", False, f"{ATTENTION}.TensorParallelAttention.load", sinks_of_rank_0),
    ("gpt-oss", False, f"{ATTENTION}.softmax_with_sinks", no_sinks),
    ("Gemma-2", False, f"{ATTENTION}.soft_cap", not_capped),
    ("Gemma-2", False, "tplab.model.decoder.soft_cap", not_capped),
    ("norm over the full width", False, "tplab.model.norm.FullWidthNorm.__call__", own_heads_only),
    ("weight + 1, embedding scaled", False, "tplab.model.norm.GemmaRMSNorm.forward", weight_as_it_is),
    ("layers without rotation", False, f"{ATTENTION}.leave", rotated_all_the_same),
    ("pairs", False, f"{ATTENTION}.rotate", halves),
    ("multipliers", False, "tplab.model.decoder.DecoderLayer.scaled", not_scaled),
    ("multipliers", False, "tplab.model.decoder.TensorParallelCausalLM.finish", not_scaled),
    ("experts, renormalised", False, f"{EXPERTS}.softmax_then_top_k", not_renormalised),
    ("experts", False, f"{EXPERTS}.softmax_then_top_k", softmax_over_the_chosen),
    ("experts", True, f"{EXPERTS}.FusedMoE.forward", local_ids),
    ("experts", True, f"{EXPERTS}.FusedMoE.forward", top_k_of_own),
    ("gpt-oss", False, "tplab.shard.linear.RowParallelLinear.partial", bias_on_every_rank),
    ("experts", False, f"{EXPERTS}.all_reduce", reduced_twice),
    ("experts", True, f"{EXPERTS}.all_reduce", reduced_on_no_rank),
    ("shared expert", False, "tplab.model.mlp.GatedMLP.partial", shared_on_rank_0),
]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """``right(name)``: a model of the table and Hugging Face's logits of it, made once."""
    made = {}

    def get(name):
        if name not in made:
            ckpt = open_checkpoint(make_model(tmp_path_factory.mktemp("trait") / "m", **TRAITS[name]))
            made[name] = ckpt, torch.cat(hf_logits(ckpt, torch.float32, some_prompts(71)))
        return made[name]
    return get


@pytest.mark.parametrize(("name", "dealt_out", "target", "mistake"), MISTAKES,
                         ids=[f"{name}: {mistake.__name__}" for name, _, _, mistake in MISTAKES])
def test_a_mistake_leaves_the_floor_by_far(right, name, dealt_out, target, mistake):
    ckpt, logits = right(name)
    plan = ShardPlan.from_config(ckpt.config, 2, enable_expert_parallel=dealt_out)
    with applied(Patch(target, mistake)):
        wrong = logical_ranks(2, our_logits, ckpt, plan, torch.float32, some_prompts(71))
    worst = max((own - logits).abs().max().item() for own in wrong)
    assert worst > 1000 * bound("logits", logits.abs().max().item(), torch.float32)
