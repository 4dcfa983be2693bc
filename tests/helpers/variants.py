"""Mistakes that have a name as a fault or a probe, written in other code: at another place, or by other means."""

import copy

import torch
from torch.nn import functional as F

from tplab.model.loader import load_model as right_load_model
from tplab.patch import Patch, original
from tplab.ranks import all_reduce, rank, world_size

ATTENTION, DECODER = "model.attention.TensorParallelAttention", "model.decoder.DecoderLayer"
COLUMN, QKV, ROW = (f"shard.linear.{kind}Linear" for kind in ("MergedColumnParallel", "QKVParallel", "RowParallel"))
EMBEDDING, HEAD = "shard.embedding.VocabParallelEmbedding", "shard.embedding.ParallelLMHead"
NORM, ROTARY, GATED = "model.norm.RMSNorm", "model.rope.Rotary", "model.mlp.GatedMLP"

VARIANTS: dict[str, tuple[str, list[Patch]]] = {}  # what is done → (its name, patches)


def variant(words: str, name: str, target: str, replacement) -> None:
    VARIANTS[words] = name, [Patch(f"tplab.{target}", replacement)]


def then(target: str, change):
    """The right function, and ``change(self, *arguments)`` after it."""
    def wrong(self, *args, **options):
        result = original(f"tplab.{target}")(self, *args, **options)
        changed = change(self, *args)
        return result if changed is None else changed
    return wrong


def set_to(**values):
    """Other attributes than those that ``__init__`` gives; a value may be a function of the old one."""
    def change(self, *args):
        for name, value in values.items():
            setattr(self, name, value(getattr(self, name)) if callable(value) else value)
    return change


def loaded(target: str, change, parameter=("weight", "bias")):
    """Another parameter than the loaded one: ``change(what was loaded)``."""
    def after(self, which, *sources):
        if which in parameter:
            getattr(self, which).data.copy_(change(self, getattr(self, which).data.clone()))
    return then(target, after)


# Norms.

variant("epsilon from the start", "norm_epsilon", f"{NORM}.__init__", then(f"{NORM}.__init__", set_to(eps=1e-3)))
variant("a norm's weight of ones", "norm_weight_missing", f"{NORM}.load",
        loaded(f"{NORM}.load", lambda s, x: torch.ones_like(x)))
variant("1 added on loading", "norm_plus_one", f"{NORM}.load", loaded(f"{NORM}.load", lambda s, x: x + 1))
variant("centred before the norm", "layer_norm", f"{NORM}.forward", lambda self, x: original(f"tplab.{NORM}.forward")(
    self, x - x.mean(-1, keepdim=True)))
variant("a norm by std", "norm_by_deviation", f"{NORM}.forward", lambda self, x: self.weight * x / (
    x.std(-1, keepdim=True) ** 2 + self.eps) ** 0.5)
variant("a norm by normalize", "norm_by_sum", f"{NORM}.forward", lambda self, x: self.weight * F.normalize(x, dim=-1))
variant("the stream multiplied by the weight", "norm_missing", f"{NORM}.forward", lambda self, x: torch.einsum(
    "...d,d->...d", x, self.weight))


# Weights.

def moved(self, which, *sources):
    """q, k and v one after the other in another order."""
    q, k, v = (source[rows.start:rows.stop] for source, rows in zip(sources, self.ranges))
    getattr(self, which).data.copy_(torch.cat([k, v, q]))


def swapped(self, which, *sources):
    if len(sources) == 2:
        return original(f"tplab.{COLUMN}.load")(self, which, *sources[::-1])
    return original(f"tplab.{COLUMN}.load")(self, which, *sources)


def in_pairs(self, x):
    heads = x.unflatten(0, (-1, self.head_size))
    turned = sum(self.split_sizes[:2]) // self.head_size
    pairs = torch.stack([heads[:turned, :self.head_size // 2], heads[:turned, self.head_size // 2:]], 2).flatten(1, 2)
    return torch.cat([pairs, heads[turned:]]).flatten(0, 1)


def of_next_layer(ckpt, plan, *args):
    model = right_load_model(ckpt, plan, *args)
    for module in ("self_attn", "mlp"):
        setattr(model.layers[0], module, copy.deepcopy(getattr(model.layers[1], module)))
    model.layers[0].self_attn.layer = model.layers[0].mlp.layer = 0
    return model


variant("a bias of zeros", "bias_missing", f"{COLUMN}.load", loaded(f"{COLUMN}.load", lambda s, x: x * 0, ("bias",)))
variant("twice the bias on loading", "bias_twice", f"{QKV}.load",
        loaded(f"{QKV}.load", lambda s, x: 2 * x, ("bias",)))
variant("the weight of zeros", "weight_not_loaded", f"{ROW}.load",
        loaded(f"{ROW}.load", lambda s, x: x * 0, ("weight",)))
variant("stacked as [k|v|q]", "qkv_order", f"{QKV}.load", moved)
variant("heads loaded in pairs", "rope_permuted_rows", f"{QKV}.load", loaded(f"{QKV}.load", in_pairs))
variant("gate's source is up's", "gate_up_order", f"{COLUMN}.load", swapped)
variant("blocks of the next layer", "wrong_layer", "align.gather.load_model", of_next_layer)
variant("columns of rank 0", "shard_of_another_rank", f"{ROW}.load", lambda self, which, source: getattr(
    self, which).data.copy_(source[:, :len(self.columns)] if which == "weight" else source[:]))


# RoPE.

def called(change):
    """``change(right, x, positions, lengths)`` in the place of the tables."""
    def wrong(self, x, positions, lengths, *kind):
        return change(lambda p: original(f"tplab.{ROTARY}.__call__")(self, x, p, lengths, *kind), x, positions, lengths)
    return wrong


variant("negative positions", "rope_direction", f"{ROTARY}.__call__", called(lambda right, x, p, n: right(-p)))
variant("positions × 1/4", "rope_scaling", f"{ROTARY}.__call__", called(lambda right, x, p, n: right(p * 0.25)))
variant("positions from 1", "rope_positions", f"{ROTARY}.__call__", called(lambda right, x, p, n: right(p + 1)))
variant("positions that run on", "rope_positions", f"{ROTARY}.__call__",
        called(lambda right, x, p, n: right(torch.arange(len(p)))))
variant("tables returned as (sin, cos)", "rope_terms", f"{ROTARY}.__call__",
        called(lambda right, x, p, n: right(p)[::-1]))
variant("tables in bfloat16", "rope_dtype", f"{ROTARY}.__call__",
        called(lambda right, x, p, n: tuple(t.bfloat16().to(x) for t in right(p))))
variant("theta in the module", "rope_theta", f"{ROTARY}.__init__", then(
    f"{ROTARY}.__init__", lambda self, config: setattr(self.embedding, "inv_freq", 1e6 ** (-torch.arange(5) / 5))))


# Attention.

def attending(weights):
    """Attention by einsum with ``weights(scores, visible)``."""
    def wrong(q, k, v, mask, scaling):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scaling
        return torch.einsum("bhqk,bhkd->bhqd", weights(scores, ~mask), v)
    return wrong


def hidden(scores, visible):
    return torch.where(visible, scores, torch.tensor(-torch.inf, dtype=scores.dtype))


def one_sequence(self, layer, k, v):
    lengths, self.lengths = self.lengths, [len(k)]
    yield from original("tplab.model.attention.NoCache.batches")(self, layer, k, v)
    self.lengths = lengths


ATTEND = "model.attention.attend"
variant("a scaling of 1", "softmax_scale", f"{ATTENTION}.__init__", then(f"{ATTENTION}.__init__", set_to(scaling=1.0)))
variant("a window of 7", "sliding_window", f"{ATTENTION}.__init__", then(f"{ATTENTION}.__init__", set_to(window=7)))
variant("scores of 0 where hidden", "mask_misused", ATTEND, attending(
    lambda s, visible: torch.softmax(torch.where(visible, s, 0 * s), -1)))
variant("only the future", "mask_inverted", ATTEND, attending(
    lambda s, visible: torch.softmax(hidden(s, ~visible), -1)))
variant("softmax over dim 2", "softmax_dim", ATTEND, attending(lambda s, visible: torch.softmax(hidden(s, visible), 2)))
variant("scores as weights", "softmax_missing", ATTEND, attending(lambda s, visible: torch.where(visible, s, 0 * s)))
variant("softmax in float16", "softmax_dtype", ATTEND, attending(
    lambda s, visible: torch.softmax(hidden(s, visible).half(), -1).to(s)))
variant("k and k", "keys_for_values", f"{ATTENTION}.attend_all", lambda self, q, k, v, context: original(
    f"tplab.{ATTENTION}.attend_all")(self, q, k, k, context))
variant("all prompts as one", "cross_sequence_attention", "model.attention.NoCache.batches", one_sequence)
variant("the queries themselves", "attention_missing", f"{ATTENTION}.attend_all", lambda self, q, k, v, context: +q)

# Sums and the residual stream.

variant("a mean of the ranks", "all_reduce_average", f"{ROW}.reduce", lambda self, x: all_reduce(x / world_size()))
variant("nothing from rank 1", "all_reduce_subset", f"{ROW}.reduce", lambda self, x: all_reduce(
    torch.zeros_like(x) if rank() == 1 else x))
variant("the embedding of this rank", "all_reduce_missing", f"{EMBEDDING}.forward", lambda self, ids: F.embedding(
    (ids - self.rows.start).clamp(0, len(self.rows) - 1), self.weight) * torch.isin(ids, torch.tensor([*self.rows])
                                                                                   )[:, None])
variant("a sublayer of zeros", "sublayer_missing", f"{DECODER}.scaled", lambda self, branch: 0 * branch)
variant("the stream for the norm", "norm_skipped", f"{DECODER}.normed", lambda self, name, norm, x: (
    original(f"tplab.{DECODER}.normed")(self, name, norm, x), x)[1])

# The MLP and the ends.

for act in (torch.nn.ReLU(), torch.nn.GELU()):
    variant(f"{act} from the start", "wrong_activation", f"{GATED}.__init__",
            then(f"{GATED}.__init__", set_to(act=lambda silu, act=act: act)))
variant("an embedding scaled on loading", "embedding_scale", f"{EMBEDDING}.load", loaded(
    f"{EMBEDDING}.load", lambda s, x: x * x.shape[1] ** 0.5 if type(s).__name__ != "ParallelLMHead" else x))
variant("the next token's embedding", "ids_shifted", f"{EMBEDDING}.forward", lambda self, ids: torch.cat(
    [(x := original(f"tplab.{EMBEDDING}.forward")(self, ids))[1:], x[:1]]))
variant("half the logits", "logits_scale", f"{HEAD}.forward", lambda self, x: F.linear(x / 2, self.weight))
variant("logits in a cap of 30", "logits_softcap", f"{HEAD}.forward",
        lambda self, x: 30 * (F.linear(x, self.weight) / 30).tanh())
variant("o in bfloat16", "low_precision", f"{ROW}.partial", lambda self, x: F.linear(
    x, self.weight, self.bias if self.adds_bias else None).bfloat16().float())
