"""Small third-party engines in the names and shapes of Hugging Face, of vLLM and of gpt-fast.

Each runs on logical ranks and takes for every rank what it is to hold, so that other layouts than the lab's, and wrong
ones, are a matter of arguments.
"""

from helpers.third_party_parts import Core, Embedding, Matrix, Rotary, ThirdParty, linear, norm_of
from torch import nn
from torch.nn.functional import silu

from tplab.ranks import all_gather, all_reduce, rank

# vLLM's names: flat tokens, fused matrices, (normed, residual), (tensor, bias).


class VllmAttention(nn.Module):
    order = "qkv"

    def __init__(self, w, at):
        super().__init__()
        self.qkv_proj = linear(w, *(f"{at}.{x}_proj" for x in self.order), pair=True)
        self.sizes = {x: len(w.rows_of(f"{x}_proj")) for x in "qkv"}
        self.rotary_emb, self.attn = Rotary(w.config), Core(w.config, w.share)
        if w.config.qk_norm:
            self.q_norm, self.k_norm = norm_of(w, f"{at}.q_norm"), norm_of(w, f"{at}.k_norm")
        self.o_proj = linear(w, f"{at}.o_proj", pair=True, reduce=True)

    def split(self, qkv):
        return dict(zip(self.order, qkv.split([self.sizes[x] for x in self.order], -1)))

    def forward(self, positions, hidden_states):
        parts = self.split(self.qkv_proj(hidden_states)[0])
        q, k, v = (parts[x] for x in "qkv")
        if hasattr(self, "q_norm"):
            q, k = (norm(x.unflatten(-1, (-1, self.attn.dim))).view(x.shape)
                    for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return silu(gate) * up


class VllmMLP(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.gate_up_proj = linear(w, f"{at}.gate_proj", f"{at}.up_proj", pair=True)
        self.act_fn, self.down_proj = SiluAndMul(), linear(w, f"{at}.down_proj", pair=True, reduce=True)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class VllmLayer(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.self_attn, self.mlp = VllmAttention(w, f"{at}.self_attn"), VllmMLP(w, f"{at}.mlp")
        self.input_layernorm = norm_of(w, f"{at}.input_layernorm")
        self.post_attention_layernorm = norm_of(w, f"{at}.post_attention_layernorm")

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class VllmModel(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.embed_tokens = Embedding(w.cut("model.embed_tokens"), w.share.vocab)
        self.layers = nn.ModuleList(VllmLayer(w, f"model.layers.{i}") for i in range(w.config.num_layers))
        self.norm = norm_of(w, "model.norm")

    def forward(self, input_ids, positions):
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]


class LogitsProcessor(nn.Module):
    """The last row of each sequence, gathered on rank 0 without the padding."""

    def __init__(self, w):
        super().__init__()
        self.weight, self.vocab = nn.Parameter(w.cut("lm_head"), False), w.config.vocab_size
        self.sizes = w.vocab_sizes

    def forward(self, hidden, last):
        logits = all_gather(hidden[last] @ self.weight.T, sizes=self.sizes)[:, :self.vocab]
        return logits if rank() == 0 else None


class VllmLike(ThirdParty):
    def __init__(self, w):
        super().__init__()
        self.model, self.logits_processor = VllmModel(w), LogitsProcessor(w)

    def call(self, ids, positions, sequences):
        hidden = super().call(ids, positions, sequences)
        last = {sequence: row for row, sequence in enumerate(sequences)}
        return self.logits_processor(hidden, list(last.values()))

    def forward(self, input_ids, positions):
        return self.model(input_ids, positions)


# Hugging Face's names: [batch, tokens], heads before tokens, separate matrices; o_proj and down_proj give summands.


class HfAttention(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(w, f"{at}.{x}_proj") for x in "qkvo")
        if w.config.qk_norm:
            self.q_norm, self.k_norm = norm_of(w, f"{at}.q_norm"), norm_of(w, f"{at}.k_norm")
        self.rotary, self.core_attention = Rotary(w.config), HfCore(w.config, w.share)

    def forward(self, hidden_states, position_ids=None):
        dim = self.rotary.dim
        q, k, v = (proj(hidden_states).unflatten(-1, (-1, dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        flat = [x.flatten(0, 1).flatten(1) for x in (q, k)]
        q, k = (turned.view(x.shape) for turned, x in zip(self.rotary(position_ids.flatten(), *flat), (q, k)))
        out = self.core_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return all_reduce(self.o_proj(out.transpose(1, 2).flatten(2))), None


class HfCore(Core):
    """``[batch, heads, tokens, dim]`` in and out."""

    def forward(self, q, k, v):
        flat = [x.transpose(1, 2).flatten(0, 1).flatten(1) for x in (q, k, v)]
        return super().forward(*flat).view(q.shape[0], q.shape[2], q.shape[1], self.dim).transpose(1, 2)


class HfMLP(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (linear(w, f"{at}.{x}_proj") for x in ("gate", "up", "down"))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return all_reduce(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class HfLayer(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.self_attn, self.mlp = HfAttention(w, f"{at}.self_attn"), HfMLP(w, f"{at}.mlp")
        self.input_layernorm = norm_of(w, f"{at}.input_layernorm")
        self.post_attention_layernorm = norm_of(w, f"{at}.post_attention_layernorm")

    def forward(self, hidden_states, position_ids=None):
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), position_ids=position_ids)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class HfModel(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(w.get("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(HfLayer(w, f"model.layers.{i}") for i in range(w.config.num_layers))
        self.norm = norm_of(w, "model.norm")

    def forward(self, input_ids, position_ids):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=position_ids)
        return self.norm(hidden)


class HfLike(ThirdParty):
    def __init__(self, w):
        super().__init__()
        self.model, self.lm_head, self.sizes = HfModel(w), linear(w, "lm_head"), w.vocab_sizes

    def forward(self, input_ids, position_ids):
        return all_gather(self.lm_head(self.model(input_ids, position_ids)), sizes=self.sizes)


# gpt-fast's names: [batch, tokens], wqkv, w1/w3/w2; the all-reduce stands in attention and feed_forward.


class FastAttention(nn.Module):
    order = "qkv"

    def __init__(self, w, at):
        super().__init__()
        self.wqkv, self.wo = linear(w, *(f"{at}.{x}_proj" for x in self.order)), linear(w, f"{at}.o_proj")
        self.sizes = [len(w.rows_of(f"{x}_proj")) for x in self.order]
        self.rotary, self.core = [Rotary(w.config)], Core(w.config, w.share)  # no module of its own: hidden in a list

    def forward(self, x, input_pos):
        parts = dict(zip(self.order, self.wqkv(x).flatten(0, 1).split(self.sizes, -1)))
        q, k, v = (parts[x] for x in "qkv")
        q, k = self.rotary[0](input_pos.flatten(), q, k)
        return all_reduce(self.wo(self.core.forward(q, k, v))).view(x.shape)


class FastFeedForward(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.w1, self.w3, self.w2 = (linear(w, f"{at}.{x}_proj") for x in ("gate", "up", "down"))

    def forward(self, x):
        return all_reduce(self.w2(silu(self.w1(x)) * self.w3(x)))


class FastBlock(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.attention, self.feed_forward = FastAttention(w, f"{at}.self_attn"), FastFeedForward(w, f"{at}.mlp")
        self.attention_norm, self.ffn_norm = (norm_of(w, f"{at}.{x}_layernorm") for x in ("input", "post_attention"))

    def forward(self, x, input_pos):
        h = x + self.attention(self.attention_norm(x), input_pos)
        return h + self.feed_forward(self.ffn_norm(h))


class FastLike(ThirdParty):
    def __init__(self, w):
        super().__init__()
        self.tok_embeddings = nn.Embedding.from_pretrained(w.get("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(FastBlock(w, f"model.layers.{i}") for i in range(w.config.num_layers))
        self.norm, self.output = norm_of(w, "model.norm"), Matrix((w.get("lm_head.weight"), None))

    def forward(self, idx, input_pos):
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, input_pos)
        return self.output(self.norm(x))
