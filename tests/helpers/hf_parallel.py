"""Hugging Face's own tensor parallelism, recorded; and bugs put into it from outside."""

import os
import re
from contextlib import ExitStack
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from tplab.model.dtypes import parse_dtype
from tplab.ranks import rank, state, world_size
from tplab.record import record

MODELING = (modeling_llama, modeling_qwen2)


def load_hf_tp(folder: str, dtype: str) -> None:
    """The ranks of a pool are in a gloo group already; Hugging Face asks the environment which of them this is."""
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.distributed import DistributedConfig

    prepare = PreTrainedModel.prepare_distribute_model

    def stay(config, device_map=None):
        # Told "cpu", Hugging Face demands accelerate, which moves models between devices. Told nothing, it stays here.
        config, _, mesh = prepare(config, device_map=device_map)
        return config, None, mesh

    os.environ |= {"RANK": str(rank()), "WORLD_SIZE": str(world_size()), "LOCAL_RANK": str(rank())}
    with mock.patch.object(PreTrainedModel, "prepare_distribute_model", stay):
        state["hf"] = AutoModelForCausalLM.from_pretrained(
            folder, dtype=parse_dtype(dtype), distributed_config=DistributedConfig(tp_plan="auto")).eval()


class Fault(NamedTuple):
    """``change(model, stack)`` on every rank; a regular expression for the diagnosis; the checkpoint's form."""

    change: object
    said: str
    form: str = "qwen2"
    hidden: str | None = None  # why bfloat16 cannot show it


FAULTS: dict[str, Fault] = {}


def fault(name, said, **more):
    def keep(change):
        FAULTS[name] = Fault(change, said, **more)
        return change
    return keep


def run(folder, to, name, prompt, new_tokens, chunk, dtype):
    """Load on this rank, put the bugs ``name`` in, record a prompt in chunks and some decoded tokens."""
    load_hf_tp(folder, dtype)
    model, ids = state.pop("hf"), list(prompt)
    with ExitStack() as stack, torch.inference_mode():
        for one in name:
            FAULTS[one].change(model, stack)
        with record(to, rank=rank(), world_size=world_size()) as rec:
            rec.watch(model)
            done, cache = 0, None
            while done < len(prompt) + new_tokens - 1:
                step = torch.tensor([ids[done:done + chunk] if done < len(prompt) else ids[done:]])
                positions = torch.arange(done, done + step.shape[1])
                rec.inputs(step, positions)
                out = model(step, position_ids=positions[None], past_key_values=cache, use_cache=True)
                done, cache = done + step.shape[1], out.past_key_values
                if done >= len(prompt):
                    ids.append(int(out.logits[0, -1].argmax()))
    return ids


def modules(model, ending):
    """The modules of a name in every layer."""
    return [module for name, module in model.named_modules() if re.fullmatch(rf"model\.layers\.\d+\.{ending}", name)]


def local(parameter):
    """This rank's part of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def forward(module, change):
    """``change(right forward)`` in the place of a module's forward."""
    module.forward = change(module.forward)


def behind(module, change):
    """``change(output)`` in the place of a module's output."""
    forward(module, lambda right: lambda *args, **kwargs: change(right(*args, **kwargs)))


def patch(stack, name, change):
    """``change(right function)`` in both modelling files."""
    for file in MODELING:
        stack.enter_context(mock.patch.object(file, name, change(getattr(file, name))))


def unreduced(stack):
    """Within it, no sum over the ranks is made."""
    stack.enter_context(mock.patch.object(dist, "all_reduce", lambda *args, **kwargs: None))


@fault("attention not reduced", "all_reduce_(missing|dropped)")
def _(model, stack):
    for module in modules(model, "self_attn.o_proj"):
        def without(right):
            def call(*args, **kwargs):
                with ExitStack() as inner:
                    unreduced(inner)
                    return right(*args, **kwargs)
            return call
        forward(module, without)


@fault("MLP averaged", "all_reduce_average")
def _(model, stack):
    for module in modules(model, "mlp.down_proj"):
        behind(module, lambda out: out / world_size())


@fault("MLP reduced twice", "all_reduce_twice")
def _(model, stack):
    for module in modules(model, "mlp.down_proj"):
        behind(module, lambda out: dist.all_reduce(out) or out)


@fault("o_proj's bias on every rank", "row_bias_everywhere|bias_twice", form="biases")
def _(model, stack):
    for module in modules(model, "self_attn.o_proj"):
        bias = local(module.bias)
        behind(module, lambda out, bias=bias: out + bias * (world_size() - 1))


@fault("RoPE in pairs", "rope_pairs")
def _(model, stack):
    def pairs(right):
        def apply(q, k, cos, sin, unsqueeze_dim=1):
            half = cos.shape[-1] // 2
            cos, sin = (x[..., :half].unsqueeze(unsqueeze_dim) for x in (cos, sin))
            return tuple(torch.stack([x[..., 0::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., 0::2] * sin],
                                     -1).flatten(-2) for x in (q, k))
        return apply
    patch(stack, "apply_rotary_pos_emb", pairs)


@fault("no RoPE", "rope_(missing|swallowed)")
def _(model, stack):
    patch(stack, "apply_rotary_pos_emb", lambda right: lambda q, k, *args, **kwargs: (q, k))


@fault("RoPE turned the other way", "rope_direction")
def _(model, stack):
    patch(stack, "apply_rotary_pos_emb", lambda right: lambda q, k, cos, sin, *args, **kwargs: right(q, k, cos, -sin))


@fault("theta 10000", "rope_default_theta|rope_theta")
def _(model, stack):
    rotary, dim = model.model.rotary_emb, model.config.head_dim
    rotary.inv_freq = 1.0 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim)


@fault("decode position one too far", "decode_position_off_by_one")
def _(model, stack):
    forward(model.model.rotary_emb, lambda right: lambda x, position_ids, *args, **kwargs: right(
        x, position_ids + (position_ids.shape[1] == 1), *args, **kwargs))


@fault("KV heads repeated in turns", "query_to_kv|repeated_kv_stored", form="even")
def _(model, stack):
    from transformers.integrations import sdpa_attention

    def in_turns(states, times):
        return states.repeat(1, times, 1, 1)
    stack.enter_context(mock.patch.object(sdpa_attention, "repeat_kv", in_turns))
    stack.enter_context(mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *args: False))
    # A decoding token has a way of its own, which repeats nothing, unless the model is compiled.
    stack.enter_context(mock.patch.object(sdpa_attention, "is_torchdynamo_compiling", lambda: True))


@fault("scores not scaled", "softmax_scale")
def _(model, stack):
    for module in modules(model, "self_attn"):
        module.scaling = 1.0


@fault("no mask", "no_mask")
def _(model, stack):
    patch(stack, "create_causal_mask", lambda right: lambda *args, **kwargs: None)
    for module in modules(model, "self_attn"):
        module.is_causal = False


@fault("a decoded token is not kept", "cache_rows_lost")
def _(model, stack):
    from transformers.cache_utils import DynamicLayer

    right = DynamicLayer.update

    def update(self, keys, values, *args, **kwargs):
        if keys.shape[-2] > 1:
            return right(self, keys, values, *args, **kwargs)
        kept = self.keys, self.values
        found = right(self, keys, values, *args, **kwargs)
        self.keys, self.values = kept
        return found
    stack.enter_context(mock.patch.object(DynamicLayer, "update", update))


@fault("epsilon 0.01", "norm_epsilon", hidden="5e-3 of the scale")
def _(model, stack):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.01


@fault("1 + weight", "norm_plus_one")
def _(model, stack):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.weight = nn.Parameter(module.weight + 1)


@fault("norms exchanged", "norm_weight_exchanged")
def _(model, stack):
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm


@fault("gelu", "wrong_activation")
def _(model, stack):
    for module in modules(model, "mlp"):
        module.act_fn = nn.GELU()


@fault("gate and up exchanged", "gate_up_order")
def _(model, stack):
    for module in modules(model, "mlp"):
        module.gate_proj, module.up_proj = module.up_proj, module.gate_proj


@fault("rank 1 multiplies with rank 0's keys", "kv_first_rows|shard_of_another_rank")
def _(model, stack):
    for module in modules(model, "self_attn.k_proj"):
        for parameter in (module.weight, module.bias):
            dist.broadcast(local(parameter.data), 0)


@fault("q's bias left out", "bias_missing")
def _(model, stack):
    for module in modules(model, "self_attn.q_proj"):
        local(module.bias.data).zero_()


@fault("layer 1 has layer 0's down_proj", "wrong_layer")
def _(model, stack):
    first, second, *_ = modules(model, "mlp.down_proj")
    local(second.weight.data).copy_(local(first.weight.data))


@fault("v_proj not loaded on rank 1", "weight_not_loaded")
def _(model, stack):
    if rank() == 1:
        for module in modules(model, "self_attn.v_proj"):
            local(module.weight.data).zero_()


@fault("a random head", "head_random|weight_not_loaded")
def _(model, stack):
    generator = torch.Generator().manual_seed(rank())
    weight = local(model.lm_head.weight.data)
    weight.copy_(torch.randn(weight.shape, generator=generator))


@fault("embeddings of the token before", "ids_shifted|embed")
def _(model, stack):
    forward(model.model.embed_tokens, lambda right: lambda ids: right((ids - 1).clamp(min=0)))


TWO = [("attention not reduced", "gelu"), ("theta 10000", "MLP averaged"), ("1 + weight", "scores not scaled"),
       ("q's bias left out", "MLP reduced twice")]
