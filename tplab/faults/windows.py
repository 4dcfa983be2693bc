"""Faults of features that a Llama does not have: windows, sinks, caps, other norms, other rotations."""

import copy

import torch

from tplab.faults.fault import bug, only_if, two_ranks
from tplab.model.attention import mask_scores, soft_cap, softmax
from tplab.patch import original
from tplab.ranks import world_size


def window_one_too_wide(mask, window):
    seen = (~mask).sum(-1, keepdim=True)
    here = torch.arange(mask.shape[-1])
    return mask | (here < seen - window - 1)               # the query itself is not counted


def window_wrong_layers(self, config, plan, layer, dtype):
    original("tplab.model.attention.TensorParallelAttention.__init__")(self, config, plan, layer, dtype)
    self.window = config.windows[(layer + 1) % config.num_layers]    # layers are counted from 1 here


def window_from_chunk_start(mask, window):
    row = torch.arange(mask.shape[-2])[:, None]            # row 0 of a chunk is treated as the text's first token
    return mask | (torch.arange(mask.shape[-1]) <= row - window)


def sinks_of_rank_0(self, parameter, source):
    heads = len(self.shard.q_heads)
    getattr(self, parameter).data.copy_(source[:heads])    # the first heads, on every rank


def sinks_once_per_rank(scores, sinks):
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    every = torch.cat([scores, *[column] * world_size()], dim=-1)    # one for each rank
    return torch.softmax(every, dim=-1)[..., :scores.shape[-1]]


def capped_after_mask(q, k, v, mask, scaling, *, softcap=None, sinks=None):
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    scores = mask_scores((grouped @ k.transpose(2, 3)).view(*q.shape[:3], -1) * scaling, mask)
    scores = soft_cap(scores, softcap) if softcap else scores        # minus infinity becomes minus the cap
    weights = softmax(scores)
    return (weights.view(*grouped.shape[:3], -1) @ v).view(q.shape)


def logits_capped_twice(self, logits):
    cap = self.config.final_logit_softcapping
    logits = logits / self.config.logits_scaling
    return soft_cap(soft_cap(logits, cap), cap) if cap else logits   # on each rank, and again once they are joined


def qk_norm_own_heads(self, q_norm, k_norm, q, k):
    def normed(norm, x, heads):
        mean = x.float().pow(2).mean((1, 2), keepdim=True)           # over this rank's heads
        own = norm.weight.view(-1, x.shape[-1])[heads.start:heads.stop]
        return (own * (x.float() * torch.rsqrt(mean + norm.eps))).to(x.dtype)
    return normed(q_norm, q, self.shard.q_heads), normed(k_norm, k, self.shard.kv_heads)


def norm_plus_one_forgotten(self, x):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
    return (wide * self.weight).to(x.dtype)                # this model's factor is 1 + weight


def embedding_unscaled(self, input_ids):
    hidden = self.embed_tokens(input_ids)
    if len(input_ids) == 1:                                # one new token takes another path
        return hidden
    return hidden * self.embedding_multiplier


def rope_in_every_layer(q, k, cos, sin):
    def turn(x):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin  # also in layers without positions
    return turn(q), turn(k)


def rope_whole_head(self, config):
    config = copy.deepcopy(config)
    config.rope_parameters["partial_rotary_factor"] = 1.0  # the config has a smaller one
    original("tplab.model.rope.Rotary.__init__")(self, config)


_sliding = only_if(lambda c: c.windows[0], "the first layer has no sliding window")
_some_sliding = only_if(lambda c: c.windows[0] != c.windows[1 % c.num_layers], "the first two layers see equally far")
_sinks = only_if(lambda c: c.sinks, "this model has no sinks", two_ranks)
_capped_scores = only_if(lambda c: c.attn_logit_softcapping, "this model's scores have no cap")
_capped_logits = only_if(lambda c: c.final_logit_softcapping, "this model's logits have no cap")
_full_width = only_if(lambda c: c.full_width_qk_norm, "this model has no norm over all heads", two_ranks)
_plus_one = only_if(lambda c: c.norm == "GemmaRMSNorm", "this model's norms multiply by the weight itself")
_scaled_embedding = only_if(lambda c: c.embedding_multiplier != 1, "this model's embedding is not scaled")
_unturned = only_if(lambda c: c.num_layers > 1 and not c.rotates[1], "the second layer rotates q and k")
_part_of_a_head = only_if(lambda c: c.partial_rotary_factor != 1, "the whole head is rotated")
_NOTEBOOK = "12_experts"
_ATTENTION = "tplab.model.attention"

FAULTS = (
    bug(f"{_ATTENTION}.within_window", window_one_too_wide, "the window does not count the query itself",
        "Right up to the window's length; after it each token sees one token too many.",
        ("transformers gave its window to flash attention, which counts the keys before the query: one token more than "
         "eager attention sees.", "https://github.com/huggingface/transformers/issues/39408"),
        ("SGLang counts without the query, and a Gemma port passed the config's number unchanged.",
         "https://github.com/sgl-project/sglang/pull/26147"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, needs=_sliding),
    bug(f"{_ATTENTION}.TensorParallelAttention.__init__", window_wrong_layers, "the layers' windows are shifted by one",
        "Short prompts are right; with long ones, layers that should see everything do not, and others see too much.",
        ("lmdeploy gave every layer of Gemma 3 the window; a reviewer saw wrong text on two ranks.",
         "https://github.com/InternLM/lmdeploy/pull/3772"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, needs=_some_sliding),
    bug(f"{_ATTENTION}.within_window", window_from_chunk_start, "the window is counted from the chunk's first token",
        "A prompt that is read at once is right; later tokens see all tokens before them.",
        ("ExecuTorch masked a chunk's rows alike, so that later rows saw more keys than the window has; several chunks "
         "gave other numbers than one.", "https://github.com/pytorch/executorch/pull/21857"),
        ("mlxcel made the mask of a second chunk as if the text began there; Gemma wrote reserved tokens.",
         "https://github.com/lablup/mlxcel/issues/885"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, needs=_sliding, shows_in="decode"),
    bug(f"{_ATTENTION}.TensorParallelAttention.load", sinks_of_rank_0, "every rank has the first heads' sinks",
        "Correct on one rank; on more, the other ranks' heads attend a little too much or too little.",
        ("A port of DeepSeek V4 loaded the sinks of all heads on every rank; there the sizes did not fit, and loading "
         "failed.", "https://github.com/lightseekorg/tokenspeed/pull/254"),
        ("A review found that Megatron-LM's sinks had the size of all heads, not of a rank's.",
         "https://github.com/NVIDIA/Megatron-LM/pull/6400"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, needs=_sinks),
    bug(f"{_ATTENTION}.softmax_with_sinks", sinks_once_per_rank, "a head's sink counts once for each rank",
        "Correct on one rank; with every further rank each token attends less to all others.",
        ("The opposite: prime-rl's context parallel attention left out the sinks, without an error.",
         "https://github.com/PrimeIntellect-ai/prime-rl/pull/3397"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, needs=_sinks),
    bug(f"{_ATTENTION}.attend", capped_after_mask, "scores are capped after the mask",
        "Nothing is NaN, and every token sees the future a little: hidden scores are minus the cap.",
        ("ONNX's Attention was specified like this; an issue shows that minus infinity becomes a finite score.",
         "https://github.com/onnx/onnx/issues/7865"),
        ("A code generator that followed it gave masked places weight.",
         "https://github.com/emmtrix/emx-onnx-cgen/pull/731"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, needs=_capped_scores),
    bug("tplab.model.decoder.TensorParallelCausalLM.finish", logits_capped_twice, "logits are capped twice",
        "Greedy text is right, because the order is the same; sampled text is too random.",
        ("At the same place, vLLM's transformers backend did not cap at all, and greedy text did not show it.",
         "https://github.com/vllm-project/vllm/pull/52173"),
        first_point="logits", notebook=_NOTEBOOK, needs=_capped_logits),
    bug(f"{_ATTENTION}.FullWidthNorm.__call__", qk_norm_own_heads, "q and k are normalised over a rank's own heads",
        "Correct on one rank; on more, every head is a little too large or too small.",
        ("exllamav3 on several GPUs: MiniMax M2 normalises over all heads, and each device took only its own.",
         "https://github.com/turboderp-org/exllamav3/pull/141"),
        ("vLLM's MiniMax M2 had wrong sizes of these norms on several ranks.",
         "https://github.com/vllm-project/vllm/pull/35932"),
        first_point="layers.0.q_norm", notebook=_NOTEBOOK, needs=_full_width),
    bug("tplab.model.norm.GemmaRMSNorm.forward", norm_plus_one_forgotten, "the norm's weight lacks its 1",
        "The text is unreadable: where the weight is near 0, so is the result.",
        ("aprender ran Gemma with Llama's norms and scales: the text was unreadable.",
         "https://github.com/paiml/aprender/pull/2096"),
        ("The opposite: mold added 1 to weights to which a converter had already added it.",
         "https://github.com/utensils/mold/issues/1074"),
        first_point="layers.0.input_norm", notebook=_NOTEBOOK, needs=_plus_one),
    bug("tplab.model.decoder.TensorParallelCausalLM.embed", embedding_unscaled, "one path does not scale the embedding",
        "The first token is right; the embeddings of later tokens have the wrong scale.",
        ("Gemma 3 scales in its embedding, Gemma 1 after it: OpenTau did both on one path, and its words were 51 times "
         "as large as its images.", "https://github.com/TensorAuto/OpenTau/pull/179"),
        ("vLLM moved Gemma's scaling to a place that all paths pass, because the path with ready embeddings did not "
         "scale.", "https://github.com/vllm-project/vllm/pull/36787"),
        first_point="embed", notebook=_NOTEBOOK, needs=_scaled_embedding, shows_in="decode"),
    bug(f"{_ATTENTION}.no_rotation", rope_in_every_layer, "layers without rotation rotate",
        "Short texts read well; distant tokens are found less often.",
        ("A report on SmolLM3 shows by the dumped queries of equal tokens that the layers without positions are "
         "rotated.", "https://github.com/airockchip/rknn-llm/issues/501"),
        ("ExecuTorch reads the interval from SmolLM3's config and does not use it: \"what what what what\".",
         "https://github.com/pytorch/executorch/issues/22043"),
        first_point="layers.1.q_rope", notebook=_NOTEBOOK, needs=_unturned),
    bug("tplab.model.rope.Rotary.__init__", rope_whole_head, "the whole head is rotated instead of a part",
        "Fluent, but wrong about earlier text: numbers that carry no position are rotated.",
        ("mlx-lm rotated all 128 numbers of GLM-4's heads, where 64 is right.",
         "https://github.com/ml-explore/mlx-lm/pull/1698"),
        ("Phi-4-mini in SGLang: the partial factor of the config had no effect.",
         "https://github.com/sgl-project/sglang/issues/3935"),
        first_point="layers.0.q_rope", notebook=_NOTEBOOK, needs=_part_of_a_head),
)
