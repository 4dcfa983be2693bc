"""Notebook 04: a cache of one's own, grouped attention, and the mask of a prompt, a chunk and a token."""

import torch

from course.contiguous_cache import ContiguousKVCache, MyCache, held
from course.judge.exercise import Example, Exercise, at
from course.judge.words import NotYet
from course.judge.work import numbers, pair, unchanged
from tplab.checks import counted
from tplab.model import NoCache, load_model
from tplab.model.attention import causal_mask
from tplab.shard import ShardPlan


def used(cls, layers, kv_heads, dim, steps, dtype):
    """A cache in use: what each append gives, and what it holds in the end."""
    cache, other = cls(layers), cls(layers)
    for n, count in enumerate(steps):
        for layer in range(layers):
            # As an engine has them: cut out of one product [q | k | v], whose memory is used again afterwards.
            qkv = numbers(count, 4 * kv_heads, dim, seed=10 * n + layer, dtype=dtype)
            k, v, before = qkv[:, 2 * kv_heads:3 * kv_heads], qkv[:, 3 * kv_heads:], qkv.clone()
            both = pair(cache.append(layer, k, v), "the pair k, v of all tokens so far")
            for name, tensor in zip("kv", both):
                call = f"append to layer {layer}, {sum(steps[:n])} tokens there and {count} new"
                yield f"{call}: for {name} it returns", tensor
            unchanged("k or v", qkv.equal(before))
            qkv.fill_(77)
    first = pair(other.append(0, *(numbers(1, kv_heads, dim),) * 2), "the pair k, v of all tokens so far")
    yield "a second cache's first append gives tokens:", len(first[0])
    yield "the bytes it holds in the end (room for later tokens counts) are", held(cache)


def engine_on_it(setting, answer):
    ckpt, ids, size = setting.checkpoint, setting.ids(12), setting.tensor_parallel_size
    ran = setting.on_ranks(generate_with, ckpt, ShardPlan.from_config(ckpt.config, size), answer, ids)
    for rank, (gap, holds, needed) in enumerate(ran):
        if not gap < 1e-4 or holds != needed:
            raise NotYet(f"in an engine, in steps, the last layer's output is {gap:.1g} off what one pass computes, "
                         f"and rank {rank} holds {holds:,} bytes for {len(ids)} tokens, where {needed:,} are needed")
    return f"a token takes {ran[0][1] // len(ids):,} bytes on rank 0"


def generate_with(ckpt, plan: ShardPlan, cache_class, ids: list[int]) -> tuple[float, int, int]:
    """On a rank: how far the output in steps, through a cache of this class, is from one pass's, relative to its scale;
    the bytes that the cache holds in the end; the bytes that are needed."""
    with torch.inference_mode():
        model = load_model(ckpt, plan)
        steps, outputs = ContiguousKVCache(1, ckpt.config.num_layers, cache_class), []
        cuts = [0, 3, len(ids) - 4, *range(len(ids) - 3, len(ids) + 1)]
        for start, stop in zip(cuts, cuts[1:]):
            step = steps.context([stop - start])
            outputs.append(model(torch.tensor(ids[start:stop]), step.positions, step))
        right = model(torch.tensor(ids), torch.arange(len(ids)), NoCache([len(ids)]))
    needed = 2 * ckpt.config.num_layers * len(ids) * len(model.shard.kv_heads) * plan.head_dim * 4
    return ((torch.cat(outputs) - right).abs().max() / right.abs().max()).item(), steps.nbytes, needed


def my_attend(q, k, v, mask, scaling):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(2, 3)) * scaling
    scores = scores.masked_fill(mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


def attentions():
    for (batch, kv_heads, group, queries, keys, dim), starts, dtype, scaling in (
            ((1, 1, 4, 5, 5, 16), (0,), torch.float32, 0.25), ((1, 2, 3, 1, 6, 8), (4,), torch.float32, 0.3),
            ((2, 3, 2, 4, 7, 9), (3, 2), torch.float32, 0.3), ((1, 5, 2, 3, 5, 6), (1,), torch.bfloat16, 0.3),
            ((1, 2, 2, 3, 4, 8), (1,), torch.float32, 90.0)):
        q, k, v = (numbers(batch, heads, rows, dim, seed=heads + rows, dtype=dtype) for heads, rows in (
            (kv_heads * group, queries), (kv_heads, keys), (kv_heads, keys)))
        mask = causal_mask(torch.tensor(starts)[:, None] + torch.arange(queries), keys)
        mask[:, :, -1, 0] = True  # as in a window: so each query has a hidden key, and each key a query
        yield Example(q, k, v + 1, mask, scaling, says=(
            f"{counted(kv_heads, 'KV head')}, {group} query heads each, {queries} × {keys} queries and keys, "
            f"scaling {scaling}{' in bfloat16' * (dtype == torch.bfloat16)}"))


def my_mask(positions, keys):
    hidden = torch.arange(keys) > positions[..., None]     # [batch, queries, keys]
    return hidden[:, None]


def masks():
    for positions, keys in (([[0, 1, 2, 3, 4]], 5), ([[6]], 7), ([[3, 4, 5]], 6), ([[2], [5]], 6),
                            ([[1, 3, 2], [4, 6, 7]], 9)):
        yield Example(torch.tensor(positions), keys, says=f"positions {positions}, {keys} keys")


def looks(answer, positions, keys):
    """Row by row: which keys each query may look at."""
    mask, right = answer(positions, keys), causal_mask(positions, keys)
    if not isinstance(mask, torch.Tensor) or mask.shape != right.shape or mask.dtype != torch.bool or mask.is_meta:
        yield "it returns", mask, right
        return
    for (row, query), position in zip(torch.ones_like(positions).nonzero().tolist(), positions.flatten().tolist()):
        yield (f"the query at position {position} of sequence {row} may look at keys",
               (~mask[row, 0, query]).nonzero().flatten().tolist())


_CAT = "torch.cat([old_k, k]), torch.cat([old_v, v])"
_INF = 'float("-inf")'
EXERCISES = [
    Exercise("04", MyCache, lambda: [
        Example(3, 2, 5, (4, 1, 2), torch.float32, says="3 layers, steps of 4, 1 and 2 tokens"),
        Example(5, 3, 4, (1, 18), torch.bfloat16, says="5 layers in bfloat16")], {
        "only what is new comes back: where are the earlier ones?":
            "return self.k[layer], self.v[layer] -> return k, v",
        "earlier tokens have changed since they were given: their memory is used again, so keep a copy":
            f"{_CAT} -> (k if self.k[layer] is None else torch.cat([old_k, k])), "
            "(v if self.v[layer] is None else torch.cat([old_v, v]))",
        "earlier tokens have changed: contiguous() copies only what is not contiguous, and one token is; use clone()":
            "old_k = k[:0] if self.k[layer] is None else self.k[layer] -> "
            "self.k[layer] = [*(self.k[layer] or []), k.contiguous()] ;; "
            "old_v = v[:0] if self.v[layer] is None else self.v[layer] -> "
            "self.v[layer] = [*(self.v[layer] or []), v.contiguous()] ;; "
            f"self.k[layer], self.v[layer] = {_CAT} -> pass ;; return self.k[layer], self.v[layer] -> "
            "return torch.cat(self.k[layer]), torch.cat(self.v[layer])",
        "each KV head is stored several times: repeat heads for attention only": tuple(
            f"old_k = -> k, v = k.repeat_interleave({group}, 1), v.repeat_interleave({group}, 1); old_k ="
            for group in (2, 4)),
        "new tokens come first, and the oldest must":
            f"{_CAT} -> torch.cat([k, old_k]), torch.cat([v, old_v])",
        "k and v have changed places": "return self.k[layer], self.v[layer] -> return self.v[layer], self.k[layer]",
        "all layers share one store: what another layer has stored is given out": "old_k = -> layer = 0; old_k =",
        "a second cache gives out the tokens of the first: are the tensors in the class, and not in self?":
            "self.k, self.v = [None] * num_layers, [None] * num_layers -> pass ;; def append -> "
            "k, v = [None] * 9, [None] * 9; append = lambda self, *a: self.add(*a)\n    def add",
    }, "on {ranks}, an engine on your cache computes what one pass over the text computes", used, within=0,
             engine=engine_on_it, dims="token, KV head, number"),
    Exercise("04", my_attend, attentions, {
        "query heads 0 and 1 read the same KV head, as neighbours do: in which order must the copies lie?":
            "k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1) -> k.repeat(1, group, 1, 1), "
            "v.repeat(1, group, 1, 1)",
        "k and v are repeated in different orders: what belongs to one key must stay together": (
            "v.repeat_interleave(group, dim=1) -> v.repeat(1, group, 1, 1)",
            "k.repeat_interleave(group, dim=1), -> k.repeat(1, group, 1, 1),"),
        "0 · -inf is NaN: choose the hidden scores, and write -inf there":
            f"scores.masked_fill(mask, {_INF}) -> scores + mask * {_INF}",
        "the weights are multiplied by k, and by v is right": "weights @ v -> weights @ k",
        "hidden keys can still be seen: exp of their scores must be 0, and exp of 0 is 1": f"{_INF} -> 0",
        "the scores are not multiplied by scaling": "* scaling -> ",
        "scores are multiplied by 1 / sqrt(head_dim), the default of scaled_dot_product_attention, not by scaling":
            "* scaling -> * q.shape[-1] ** -0.5",
        "-100 is not low enough beside the scores of every model":
            f"scores.masked_fill(mask, {_INF}) -> scores - 100.0 * mask",
        "scores are divided by scaling, and multiplied by it is right": "* scaling -> / scaling",
        "scaling comes before softmax": "* scaling ->  ;; weights @ v -> weights * scaling @ v",
        "scaling is in it, and head_dim ** -0.5 besides": "* scaling -> * scaling * q.shape[-1] ** -0.5",
        "the mask is not used: tokens see the future": f".masked_fill(mask, {_INF}) -> ",
        "hidden keys take part in the softmax: the mask comes before it": f".masked_fill(mask, {_INF}) ->  ;; "
            "weights @ v -> weights.masked_fill(mask, 0) @ v",
        "True in the mask means: must not look. Yours looks just there": "(mask, -> (~mask,",
        "queries are counted from key 0 on, as is_causal and triu(1) do; the mask knows where they stand":
            "(mask, -> (torch.ones_like(mask).triu(1),",
        "the softmax runs over the queries, and it must run over the keys": (
            "dim=-1, -> dim=-2,", f"dim=-1, -> dim=-2, ;; {_INF} -> -1e9"),
    }, patches=at("tplab.model.attention.attend"), dims="sequence, query head, query, number",
             place="computes attention", engine=lambda setting, answer: setting.align(dtype=setting.narrow)),
    Exercise("04", my_mask, masks, {
        "a token may look at itself": "> positions -> >= positions",
        "it is the wrong way round: True means must not look": "> positions -> <= positions",
        "nothing is hidden": "> positions -> > keys + positions",
        "queries and keys have changed places": "return hidden[:, None] -> return hidden.mT[:, None]",
        "queries are counted from key 0 on; positions say where they stand":
            "positions[..., None] -> torch.arange(positions.shape[1])[:, None].expand(*positions.shape, 1)",
        "the first query's position is used for all queries": "positions[..., None] -> "
            "positions[:, :1, None].expand(*positions.shape, 1)",
        "the positions of sequence 0 are used for all sequences":
            "> positions[..., None] -> > positions[:1, :, None].expand(*positions.shape, 1)",
        "positions need not be consecutive: yours are counted on from the first one":
            "positions[..., None] -> (positions[:, :1] + torch.arange(positions.shape[1]))[..., None]",
        "the queries are taken to be the last keys, in order; positions say where they stand":
            "keys) > positions[..., None] -> keys).expand(*positions.shape, keys) > "
            "torch.arange(keys - positions.shape[1], keys)[:, None]",
    }, "on {ranks}, prompts in chunks and tokens behind them agree with Hugging Face", looks,
             at("tplab.model.attention.causal_mask", "tplab.cache.paged.causal_mask"), dims="sequence, 1, query, key",
             within=0, place="makes the mask", engine=lambda setting, answer: setting.align_in_chunks())]
