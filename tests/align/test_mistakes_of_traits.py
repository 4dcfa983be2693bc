"""Mistakes of traits that the museum's wing does not show: each has its name from ``align``."""

import pytest
import torch
from helpers.trait_models import TRAITS, make_model

from tplab.align import align
from tplab.checkpoint import open_checkpoint
from tplab.faults.scenarios import plain_prompts
from tplab.model.rope import rotate
from tplab.patch import Patch, original

ATTENTION = "tplab.model.attention"


def no_sinks(scores, sinks):
    return torch.softmax(scores, -1)


def not_capped(x, cap):
    return x


def each_head(self, q_norm, k_norm, q, k):
    def normed(norm, x, heads):
        wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
        return norm.weight.view(-1, x.shape[-1])[heads.start:heads.stop] * wide
    return normed(q_norm, q, self.shard.q_heads), normed(k_norm, k, self.shard.kv_heads)


def routed_alone(self, x, logits):
    return self.experts(x, *self.route(logits))


def one_too_narrow(mask, window):
    return original(f"{ATTENTION}.within_window")(mask, window - 1)


def not_scaled(self, branch):
    return branch


def halves(model_type):
    return rotate("phi3")


MISTAKES = [
    ("sinks_missing", "gpt-oss", f"{ATTENTION}.softmax_with_sinks", no_sinks),
    ("scores_uncapped", "Gemma-2", f"{ATTENTION}.soft_cap", not_capped),
    ("logits_uncapped", "Gemma-2", "tplab.model.decoder.soft_cap", not_capped),
    ("qk_norm_each_head", "norm over the full width", f"{ATTENTION}.FullWidthNorm.__call__", each_head),
    ("shared_expert_missing", "shared expert", "tplab.model.experts.SparseMoeBlock.partial", routed_alone),
    ("sliding_window", "Gemma-3", f"{ATTENTION}.within_window", one_too_narrow),
    ("residual_unscaled", "multipliers", "tplab.model.decoder.DecoderLayer.scaled", not_scaled),
    ("rope_pairs", "pairs", f"{ATTENTION}.rotate", halves),
    ("logits_scale", "multipliers", "tplab.model.decoder.TensorParallelCausalLM.finish", not_scaled)]


@pytest.mark.parametrize(("fault", "model", "target", "mistake"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_mistake_is_named(tmp_path, fault, model, target, mistake):
    ckpt = open_checkpoint(make_model(tmp_path / "m", **TRAITS[model]))
    found = align(ckpt, plain_prompts(71), patches=[Patch(target, mistake)], logical=True).diagnoses
    assert found and all(fault in one.names for one in found), found
