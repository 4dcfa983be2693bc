"""A learner's engine: Llama and Qwen2 checkpoints over a few processes, with the recorder's three lines in it.

    torchrun --nproc-per-node 2 learner.py CHECKPOINT RUN_FOLDER

It knows nothing of tplab. Tests put bugs into this text (``learner_faults.py``) and run it on the ranks of a pool.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import silu

from tplab.record import record  # or: from record import record


def linear(weight, bias=None):
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    layer.bias = bias if bias is None else nn.Parameter(bias)
    return layer


class RMSNorm(nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x, positions, theta):
    dim = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angles = positions[:, None].float() * inverse
    angles = torch.cat([angles, angles], -1)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, w, config, layer, rank, size, rec):
        super().__init__()
        self.layer, self.rec, self.past = layer, rec, None
        self.dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.theta, self.size = config["rope_parameters"]["rope_theta"], size
        heads = config["num_attention_heads"]
        self.group = heads // config["num_key_value_heads"]
        q = range(rank * heads // size, (rank + 1) * heads // size)
        kv = range(q[0] // self.group, q[-1] // self.group + 1)
        self.reads = [head // self.group - kv[0] for head in q]
        at = f"model.layers.{layer}.self_attn"
        rows = {"q": self.rows(q), "k": self.rows(kv), "v": self.rows(kv)}
        weight = {x: w[f"{at}.{x}_proj.weight"][rows[x]] for x in "qkv"}
        bias = {x: w[f"{at}.{x}_proj.bias"][rows[x]] if f"{at}.q_proj.bias" in w else None for x in "qkv"}
        self.query, self.key, self.value = (linear(weight[x], bias[x]) for x in "qkv")
        self.proj = linear(w[f"{at}.o_proj.weight"][:, self.rows(q)], w.get(f"{at}.o_proj.bias") if rank == 0 else None)

    def rows(self, heads):
        return slice(heads[0] * self.dim, (heads[-1] + 1) * self.dim)

    def forward(self, x, positions):
        q, k, v = (layer(x).unflatten(-1, (-1, self.dim)) for layer in (self.query, self.key, self.value))
        q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        self.rec.tensor(f"layers.{self.layer}.q_rope", q)
        self.rec.tensor(f"layers.{self.layer}.k_rope", k)
        if self.past is not None:
            k, v = torch.cat([self.past[0], k]), torch.cat([self.past[1], v])
        self.past = k, v
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        k, v = k[:, self.reads], v[:, self.reads]
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim ** -0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = self.proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        dist.all_reduce(out)
        return out


class MLP(nn.Module):
    def __init__(self, w, at, rank, size):
        super().__init__()
        self.gate = linear(w[f"{at}.gate_proj.weight"].tensor_split(size)[rank])
        self.up = linear(w[f"{at}.up_proj.weight"].tensor_split(size)[rank])
        self.down = linear(w[f"{at}.down_proj.weight"].tensor_split(size, 1)[rank])

    def forward(self, x):
        out = self.down(silu(self.gate(x)) * self.up(x))
        dist.all_reduce(out)
        return out


class Block(nn.Module):
    def __init__(self, w, config, layer, rank, size, rec):
        super().__init__()
        at, eps = f"model.layers.{layer}", config["rms_norm_eps"]
        self.norm1 = RMSNorm(w[f"{at}.input_layernorm.weight"], eps)
        self.attn = Attention(w, config, layer, rank, size, rec)
        self.norm2 = RMSNorm(w[f"{at}.post_attention_layernorm.weight"], eps)
        self.mlp = MLP(w, f"{at}.mlp", rank, size)

    def forward(self, x, positions):
        x = x + self.attn(self.norm1(x), positions)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, w, config, rank, size, rec):
        super().__init__()
        self.size = size
        self.embed = nn.Embedding.from_pretrained(w["model.embed_tokens.weight"])
        self.blocks = nn.ModuleList(Block(w, config, i, rank, size, rec) for i in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(w["model.norm.weight"], config["rms_norm_eps"])
        head = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
        self.head = linear(head.tensor_split(size)[rank])

    def forward(self, ids, positions):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, positions)
        logits = self.head(self.norm(x))
        parts = [torch.empty_like(logits) for _ in range(self.size)]
        dist.all_gather(parts, logits)
        return torch.cat(parts, -1)


@torch.inference_mode()
def generate(folder, run, prompt, new_tokens, chunk, dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    config, w = json.loads(Path(folder, "config.json").read_text()), {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        w |= {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    with record(run, rank=rank, world_size=size) as rec:
        model = Model(w, config, rank, size, rec)
        rec.watch(model)
        ids, done = list(prompt), 0
        while done < len(prompt) + new_tokens - 1:
            step = ids[done:done + chunk] if done < len(prompt) else ids[done:]
            positions = torch.arange(done, done + len(step))
            rec.inputs(torch.tensor(step), positions)
            logits = model(torch.tensor(step), positions)
            done += len(step)
            if done >= len(prompt):
                ids.append(int(logits[-1].argmax()))
    return ids


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(generate(*sys.argv[1:3], range(5, 25), 4, 12, torch.float32))
