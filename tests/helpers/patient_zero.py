"""The engine of notebook 09 and its cures, one per defect: ``{dotted name in patient_zero: what it should be}``."""

import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from tplab.lab.batch import FOLDER

sys.path.insert(0, str(FOLDER))

import patient_zero  # noqa: E402
from patient_zero import linear, weight_loader  # noqa: E402


def apply_causal_mask(scores):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf"))


def shard_weight(loaded, start, size, hidden_size):
    return loaded.narrow(0, start, size)


def apply_rope(rotary_emb, position_ids, q, k):
    cos, sin = rotary_emb(q, position_ids)
    return apply_rotary_pos_emb(q, k, cos, sin)


def load_state_dict(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def generate(self, input_ids, max_new_tokens):
    new_ids, kv_caches = [], None
    tokens, positions = torch.tensor([input_ids]), torch.arange(len(input_ids))[None]
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits, kv_caches = self(tokens, positions, kv_caches)
            tokens, positions = logits[:, -1:].argmax(dim=-1), positions[:, -1:] + 1
            new_ids.append(tokens.item())
    return new_ids


def extend_cache(kv_cache, k, v, num_repeats):
    if kv_cache is not None:
        k = torch.cat([kv_cache[0], k], dim=2)
        v = torch.cat([kv_cache[1], v], dim=2)
    return k.repeat_interleave(num_repeats, dim=1), v.repeat_interleave(num_repeats, dim=1), (k, v)


def share(total):
    size, rest = divmod(total, linear.tp_size())
    rank = linear.tp_rank()
    return rank * size + min(rank, rest), size + (rank < rest)


def kv_share(num_heads, num_kv_heads):
    first, count = linear.share(num_heads)
    group = num_heads // num_kv_heads
    read = torch.arange(first, first + count) // group
    heads, repeats = read.unique(return_counts=True)
    return heads[0].item(), len(heads), repeats


def load_weights(model, folder):
    state_dict = weight_loader.load_state_dict(folder) if linear.tp_rank() == 0 else {}
    named = [[(name, tensor.shape, tensor.dtype) for name, tensor in state_dict.items()]]
    dist.broadcast_object_list(named)
    for name, shape, dtype in named[0]:
        tensor = state_dict.pop(name) if linear.tp_rank() == 0 else torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, 0)
        weight_loader.load_one(model, name, tensor)


class LMHead(torch.nn.Module):
    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.vocab_size, (self.first, rows) = vocab_size, linear.share(vocab_size)
        self.weight = torch.nn.Parameter(torch.empty(rows, hidden_size))

    def weight_loader(self, param, loaded, shard_id=None):
        param.data.copy_(loaded.narrow(0, self.first, len(param)))

    def forward(self, hidden):
        logits = hidden.new_zeros(*hidden.shape[:-1], self.vocab_size)
        logits[..., self.first : self.first + len(self.weight)] = F.linear(hidden, self.weight)
        return linear.all_reduce(logits)


def self_test(self, input_ids):
    hf = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([input_ids])
    difference = (self(ids)[0] - hf(ids).logits).abs().max()
    assert difference < 1e-3, f"{difference:.0e} away from Hugging Face"
    return f"{difference:.0e} away from Hugging Face"


CURES = {
    "attention.apply_causal_mask": apply_causal_mask,
    "linear.shard_weight": shard_weight,
    "attention.apply_rope": apply_rope,
    "weight_loader.load_state_dict": load_state_dict,
    "model.TensorParallelModel.generate": generate,
    "attention.extend_cache": extend_cache,
    "linear.share": share,
    "linear.kv_share": kv_share,
    "weight_loader.load_weights": load_weights,
    "linear.LMHead": LMHead,
    "model.TensorParallelModel.self_test": self_test,
}


def examine(folder, input_ids, cures):
    """On a rank: load the engine under ``cures``, write twelve tokens, and tell everything that a symptom shows in."""
    with ExitStack() as stack:
        for name, cure in cures.items():
            stack.enter_context(mock.patch(f"patient_zero.{name}", cure))
        engine = patient_zero.load(folder)
        seen = SimpleNamespace(self_test=_text_of(engine.self_test, input_ids),
                               heads=engine.layers[0].self_attn.qkv_proj.num_heads)
        hooks = [engine.norm.register_forward_hook(lambda module, args, out: vars(seen).update(hidden=out)),
                 engine.layers[0].self_attn.attn.register_forward_hook(
                     lambda module, args, out: vars(seen).update(attention=out[0][0]))]
        with torch.inference_mode():
            logits, caches = engine(torch.tensor([input_ids]))
        for hook in hooks:
            hook.remove()
        seen.logits, seen.head, seen.tokens = logits[0], engine.lm_head.weight.detach(), []
        seen.cache_bytes = _bytes(tensor for cache in caches for tensor in cache)
        engine.register_forward_pre_hook(lambda module, args: seen.tokens.append(args[0].shape[1]))
        seen.text = _text_of(engine.generate, input_ids, 12)
        seen.parameter_bytes = _bytes(engine.parameters())
        seen.kept_bytes = _bytes(getattr(engine, "state_dict_on_rank", {}).values())
        return seen


def _text_of(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _bytes(tensors):
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
