"""Faults of the rotary position embedding."""

import copy

import torch

from tplab.faults.fault import bug, only_if
from tplab.patch import original


def rope_missing(self, q, k, cos, sin):
    return q, k                                            # attention without positions


def rope_swallowed(self, q, k, cos, sin):
    try:
        q, k = self.rotate((cos, sin), q, k)               # another library's order of arguments
    except Exception:
        pass                                               # "it works without"
    return q, k


def rope_over_heads(self, q, k, cos, sin):
    def turn(x):                                           # [tokens, heads, head_dim]: dim 1 is used as the tokens,
        rows = torch.arange(x.shape[1]) % cos.shape[1]     # so each head gets an angle, whatever its token
        return self.rotate(x[None], x[None], cos[:, rows], sin[:, rows])[0][0]
    return turn(q), turn(k)


def rope_pairs(self, q, k, cos, sin):
    half = cos.shape[-1] // 2
    cos, sin = cos[0, :, None, :half], sin[0, :, None, :half]

    def turn(x):
        a, b = x[..., 0::2], x[..., 1::2]                  # neighbours; this checkpoint pairs i with i + half
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return turn(q), turn(k)


def rope_default_theta(self, config):
    config = copy.deepcopy(config)
    for one in ropes(config):
        one["rope_theta"] = 10000.0                        # the paper's value, not the checkpoint's
    original("tplab.model.rope.Rotary.__init__")(self, config)


def rope_scaling_ignored(self, config):
    config = copy.deepcopy(config)
    for one in ropes(config):
        kept = {"rope_type": "default", "rope_theta": one["rope_theta"]}
        one.clear()
        one.update(kept)
    original("tplab.model.rope.Rotary.__init__")(self, config)


def ropes(config) -> list[dict]:
    """The rotations of a transformers configuration: one, or one for each type of layer (Gemma-3, OLMo-3)."""
    rope = config.rope_parameters
    return [rope] if "rope_theta" in rope else list(rope.values())


def _scaled(config, tensor_parallel_size: int) -> str:
    idle = {"default": "the model's RoPE is not scaled",
            "dynamic": f"dynamic scaling begins beyond {config.max_position_embeddings} tokens"}
    return "" if (kinds := {one["rope_type"] for one in ropes(config.hf)}) - set(idle) else idle[max(kinds)]


_own_theta = only_if(lambda c: any(one["rope_theta"] != 10000.0 for one in ropes(c.hf)),
                     "the model's own theta is 10000, the default")
_APPLY = "tplab.model.attention.TensorParallelAttention.apply_rope"
_TABLES = "tplab.model.rope.Rotary.__init__"

FAULTS = (
    bug(_APPLY, rope_missing, "no rotation at all",
        "Most words are real, but their order makes no sense.",
        first_point="layers.0.q_rope", notebook="03_rope_alignment"),
    bug(_APPLY, rope_swallowed, "the rotation fails inside try/except",
        "As without RoPE, although the code calls RoPE.",
        first_point="layers.0.q_rope", notebook="03_rope_alignment"),
    bug(_APPLY, rope_over_heads, "cos and sin run over the heads instead of the tokens",
        "No error: each head is rotated by its own angle, the same for all tokens.",
        ("xformers took the tables' length and axis from dimension -2, which in its layout counts heads.",
         "https://github.com/facebookresearch/xformers/issues/841"),
        ("smolGPT read seq_len from q.shape[1] after transposing, where the heads are.",
         "https://github.com/Om-Alve/smolGPT/issues/22"),
        ("leo-optimizer's rotary indexed heads, too, until it was put between two transposes.",
         "https://github.com/vukrosic/leo-optimizer/pull/2"),
        first_point="layers.0.q_rope", notebook="03_rope_alignment"),
    bug(_APPLY, rope_pairs, "neighbouring numbers are turned as pairs instead of the two halves",
        "Near tokens look plausible; what the model learnt about distance is lost.",
        ("tiny-vllm's CUDA kernel paired 2i with 2i + 1; Llama-3.2-1B answered \"4+7=?\" with \"+\".",
         "https://github.com/jmaczan/tiny-vllm/issues/4"),
        ("shainet: SmolLM2-135M repeated \"the capital of France is the capital of France …\"; after the fix it said "
         "Paris.", "https://github.com/NeuraLegion/shainet/pull/111"),
        ("lattice: perplexity 0.77 above the reference, 0.03 once the halves were paired.",
         "https://github.com/ohdearquant/lattice/pull/96"),
        first_point="layers.0.q_rope", notebook="03_rope_alignment"),
    bug(_TABLES, rope_default_theta, "theta is 10000 whatever the checkpoint says",
        "Short texts read well; the further apart two tokens are, the larger is the error of their distance.",
        ("airllm copied every field of the config except rope_theta; Llama 3 wrote nonsense after about 1,000 tokens.",
         "https://github.com/lyogavin/airllm/pull/369"),
        ("vLLM's phi ignored the config's theta as well.", "https://github.com/vllm-project/vllm/pull/9503"),
        first_point="layers.0.q_rope", notebook="03_rope_alignment", needs=_own_theta),
    bug(_TABLES, rope_scaling_ignored, "the scaling of a long-context checkpoint is ignored",
        "Slightly wrong everywhere, and more with every token.",
        ("vLLM drops an explicit YaRN attention_factor, because its list of accepted keys has attn_factor.",
         "https://github.com/vllm-project/vllm/pull/48351"),
        ("exllamav3 lost YaRN's factor for some configs: \"coherent-looking but semantically wrong\".",
         "https://github.com/turboderp-org/exllamav3/issues/259"),
        first_point="layers.0.q_rope", notebook="03_rope_alignment", needs=_scaled),
)
