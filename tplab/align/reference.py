"""The Hugging Face side: the same checkpoint in transformers' own model, with a recorder at every trace point."""

import copy
from collections import OrderedDict
from collections.abc import Collection
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest import mock

import torch

from tplab.align.points import NORM_PLACES
from tplab.checkpoint import Checkpoint, ModelConfig
from tplab.checkpoint.layout import expected_shapes, read_part, tensor_parts
from tplab.model.dtypes import parse_dtype

_loaded: OrderedDict = OrderedDict()
_SMALL = 2**27  # bytes of a model that is kept beside the last one


def hf_model(ckpt: Checkpoint, dtype: torch.dtype):
    """transformers' model of a checkpoint on the CPU. The last one is kept in memory, and the one before it if it is
    small. Attention is eager, because its arithmetic is tplab's: eager casts its softmax to float32, sdpa does not.
    Experts are eager, too: one after the other.
    """
    key = ckpt.state, dtype
    if key not in _loaded:
        while len(_loaded) > 1 or _loaded and _loaded[next(iter(_loaded))].get_memory_footprint() > _SMALL:
            _loaded.popitem(last=False)
        _loaded[key] = _load(ckpt, dtype).eval()
    _loaded.move_to_end(key)
    return _loaded[key]


def _load(ckpt: Checkpoint, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bar goes to stderr with timings, which a stored notebook would then hold
    options = {"dtype": dtype, "attn_implementation": "eager"}
    if ckpt.config.experts:
        options["experts_implementation"] = "eager"
    if ckpt.config.scale_block is None and expected_shapes(ckpt.config, ()).keys() == ckpt.tensors.keys():
        return AutoModelForCausalLM.from_pretrained(ckpt.folder, local_files_only=True, **options)
    # transformers knows no fused q|k|v for these architectures, and widens no quantised weights on a CPU: hand it the
    # parts under its own names.
    model, parts = AutoModelForCausalLM.from_config(ckpt.config.hf, **options), tensor_parts(ckpt.config, ckpt.tensors)
    with ckpt.reader() as reader:
        model.load_state_dict({name: read_part(part, reader) for name, part in parts.items()},
                              strict=not ckpt.config.tie_word_embeddings)
    return model


def hf_trace(model, input_ids: list[int], wanted: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """All trace points of one prompt, or those wanted, without the batch dimension: ``[tokens, …]``; heads: ``[tokens,
    heads, dim]``."""
    with torch.inference_mode(), _own_rope(model), _recorder(model, wanted) as points:
        logits = model(input_ids=torch.tensor([input_ids]), use_cache=False).logits
        points["logits"] = logits[0]
    return points


def hf_greedy(ckpt: Checkpoint, input_ids: list[int], max_new_tokens: int, dtype: str | torch.dtype = "float32"
              ) -> list[int]:
    """What transformers' own ``generate`` writes: exactly ``max_new_tokens`` token ids, greedy, with its cache."""
    ids = torch.tensor([input_ids])
    model = hf_model(ckpt, parse_dtype(dtype))
    with _own_rope(model):  # no end of text: a comparison wants the same number of tokens from both sides
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None,
                                max_new_tokens=max_new_tokens, pad_token_id=0)
    return output[0, len(input_ids):].tolist()


@contextmanager
def _own_rope(model):
    """Give each run a fresh copy of the rotary module: one of dynamic type keeps the longest prompt so far."""
    unused = model.model.rotary_emb
    model.model.rotary_emb = copy.deepcopy(unused)
    try:
        yield
    finally:
        model.model.rotary_emb = unused


@contextmanager
def _recorder(model, wanted):
    points: dict[str, torch.Tensor] = {}
    head_dim, config = model.model.layers[0].self_attn.head_dim, ModelConfig.from_hf(model.config)
    norms = {place: name for name, place in NORM_PLACES.items()}

    modeling = import_module(type(model).__module__)
    eager = modeling.eager_attention_forward

    def recording_attention(module, query, key, value, *args, **kwargs):
        output, weights = eager(module, query, key, value, *args, **kwargs)
        at = f"layers.{module.layer_idx}."
        keep(query[0].transpose(0, 1), at + "q_rope")
        keep(key[0].transpose(0, 1), at + "k_rope")
        keep(output[0], at + "attn")
        return output, weights

    def keep(tensor, *names):
        if names := [name for name in names if wanted is None or name in wanted]:
            points.update(dict.fromkeys(names, tensor))  # no copies: transformers writes into none of them

    with ExitStack() as undo:
        def after(module, *names, heads=False):
            def hook(module, args, output):
                tensor = output[0] if isinstance(output, tuple) else output
                tensor = tensor[0] if tensor.dim() > 2 else tensor  # routers have no batch
                keep(as_heads(tensor) if heads else tensor, *names)
            undo.callback(module.register_forward_hook(hook).remove)

        def before(module, name):
            def hook(module, args):
                keep(args[0][0], name)
            undo.callback(module.register_forward_pre_hook(hook).remove)

        def parts(module, sizes, *names, heads=False):
            """Of a fused output."""
            def hook(module, args, output):
                for part, name in zip(output[0].split(sizes, -1), names):
                    keep(as_heads(part) if heads else part, name)
            undo.callback(module.register_forward_hook(hook).remove)

        def as_heads(tensor):
            if tensor.dim() == 3 and tensor.stride(0) < tensor.stride(1):  # heads stand before tokens
                tensor = tensor.transpose(0, 1)
            return tensor.reshape(tensor.shape[0], -1, head_dim)

        undo.enter_context(mock.patch.object(modeling, "eager_attention_forward", recording_attention))
        before(model.model.layers[0], "embed")  # scaled, where a model scales it
        after(model.model.norm, "norm")
        for i, layer in enumerate(model.model.layers):
            at, attn, mlp = f"layers.{i}.", layer.self_attn, layer.mlp
            for place, name in config.norms:
                after(getattr(layer, name), at + norms[place])
            if config.fused_qkv:
                parts(attn.qkv_proj, [config.q_size, config.kv_size, config.kv_size], *(at + x for x in "qkv"),
                      heads=True)
            for x in "" if config.fused_qkv else "qkv":
                after(getattr(attn, f"{x}_proj"), at + x, heads=True)
                if hasattr(attn, f"{x}_norm"):
                    after(getattr(attn, f"{x}_norm"), at + f"{x}_norm", heads=True)
            # Hugging Face has no partial sums: the sum of the ranks' partials is compared with the whole output.
            after(attn.o_proj, at + "o_partial", at + "o_proj")
            before(getattr(layer, dict(config.norms).get("post_attention_layernorm", "mlp")), at + "residual")
            if config.experts and config.experts.layers[i]:
                after(getattr(mlp, "router", None) or mlp.gate, at + "router_logits")
                after(mlp, at + "moe_partial", at + "mlp")
            else:
                if config.fused_gate_up:
                    parts(mlp.gate_up_proj, config.intermediate_size, at + "gate", at + "up")
                else:
                    after(mlp.gate_proj, at + "gate"), after(mlp.up_proj, at + "up")
                before(mlp.down_proj, at + "mlp_act")
                after(mlp.down_proj, at + "mlp_partial", at + "mlp")
            after(layer, at + "output")
        yield points
