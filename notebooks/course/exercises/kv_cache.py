"""Notebook 04: a cache of one's own, its numbers and its bytes."""

import torch

from course.exercises.rotation import numbers
from course.judge.attempt import Attempt, NotYet, Object, on_ranks, saying, several, tensor
from course.judge.compare import agree
from course.judge.verdict import Setting, exercise
from tplab.cache import ContiguousKVCache
from tplab.checks import counted
from tplab.model import NoCache, load_model
from tplab.pool import shared_pool
from tplab.shard import ShardPlan

NAME = "MyCache"


def held(thing, seen: set[int] | None = None) -> dict[int, int]:
    """``{address: bytes}`` of the memory that tensors below ``thing`` keep, a view all that it was cut from."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return {}
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()}
    parts = (thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else
             vars(thing).values() if hasattr(thing, "__dict__") and not isinstance(thing, type) else ())
    return {address: size for part in parts for address, size in held(part, seen).items()}


@exercise(NAME, "04", takes="num_layers",
          agreed="on {ranks}, an engine on your cache computes what one pass over the text computes")
def my_cache(attempt: Attempt, setting: Setting):
    """Three layers with two KV heads, five with three in bfloat16, in steps; then an engine that reads from it."""
    for layers, kv_heads, dim, steps, dtype in ((3, 2, 5, (4, 1, 2), torch.float32),
                                                (5, 3, 4, (1, 1, 18), torch.bfloat16)):
        _fill(attempt, layers, kv_heads, dim, steps, dtype)
    ckpt, ids = setting.checkpoint, setting.ids(12)
    plan = ShardPlan.from_config(ckpt.config, setting.tensor_parallel_size)
    pool = shared_pool(setting.tensor_parallel_size)
    gaps, sizes, needs = zip(*(one for one, _ in on_ranks(pool, generate_with, ckpt, plan, attempt.function, ids)))
    if not max(gaps) < 1e-4:
        raise NotYet(f"in an engine, in steps, the last layer's output is {max(gaps):.1g} off what one pass computes")
    for rank, (size, needed) in enumerate(zip(sizes, needs)):
        if size != needed:
            raise NotYet(f"in an engine, rank {rank} holds {size:,} bytes for {len(ids)} tokens; {needed:,} are needed")
    return f"{len(ids)} tokens take " + ", ".join(f"{size:,} bytes on rank {rank}" for rank, size in enumerate(sizes))


def _fill(attempt: Attempt, layers: int, kv_heads: int, dim: int, steps: tuple[int, ...], dtype) -> None:
    cache, other = (Object(attempt(layers), NAME) for _ in range(2))
    whole = {layer: tuple(numbers(sum(steps), kv_heads, dim, seed=seed).to(dtype) for seed in (layer, 90 + layer))
             for layer in range(layers)}
    for at, count in enumerate(steps):
        start = sum(steps[:at])
        for layer in range(layers):
            # As an engine has them: cut out of one product [q | k | v], whose memory is used again afterwards.
            qkv = torch.zeros(count, 4 * kv_heads, dim, dtype=dtype)
            k, v = qkv[:, 2 * kv_heads:3 * kv_heads], qkv[:, 3 * kv_heads:]
            right_k, right_v = (one[:start + count] for one in whole[layer])
            k.copy_(right_k[start:])
            v.copy_(right_v[start:])
            with saying(f"after {counted(start, 'token')} and {count} more, append to layer {layer}: "):
                found = several(cache.append(layer, k, v), "the pair k, v of all tokens so far")
                if not (k.equal(right_k[start:]) and v.equal(right_v[start:])):
                    raise NotYet("it changes the k or v that it is given; they are still needed")
                for at_, name in enumerate("kv"):
                    _compare(name, found, at_, whole, layer, start, count)
            qkv.fill_(77)
    found = other.append(0, *(one[:1] for one in whole[0]))
    if len(several(found, "the pair k, v of all tokens so far")[0]) > 1:
        raise NotYet(f"a second {NAME} gives out the tokens of the first: are the tensors in the class, or in a global "
                     "variable, instead of in self?")
    _weigh(cache.made, layers, kv_heads, dim, steps, dtype.itemsize)


def _compare(name: str, found: list, at: int, whole: dict, layer: int, start: int, count: int) -> None:
    one, (right, wrong) = found[at], (whole[layer][which][:start + count] for which in (at, 1 - at))
    if isinstance(one, torch.Tensor) and one.shape == right[start:].shape != right.shape and one.equal(right[start:]):
        raise NotYet(f"for {name} only what is new comes back: where are the earlier ones?")
    tensor(one, "tokens so far, kv_heads, head_dim", right.shape, right.dtype, it=f"for {name} comes")
    overwritten = torch.where(one == 77, one, right)
    agree(one, right, {
        "earlier tokens have changed since they were given: the memory from which they were cut is used again. Is it "
        "kept, instead of a copy? (contiguous() copies only what does not lie in one piece.)": overwritten,
        f"for {name} comes what was given for {'kv'[1 - at]}": wrong,
        "what another layer has stored is given out": tuple(
            torch.cat([pair[at][:start], right[start:]]) for other, pair in whole.items() if other != layer),
    }, f"{name} is not what was given", within=1e-6, dims="token, KV head")


def _weigh(made, layers: int, kv_heads: int, dim: int, steps: tuple[int, ...], itemsize: int) -> None:
    tokens, size = sum(steps), sum(held(made).values())
    needed = 2 * layers * tokens * kv_heads * dim * itemsize
    if size != needed:
        raise NotYet(f"after {tokens} tokens it holds {size:,} bytes; 2 · {layers} layers · {tokens} tokens · "
                     f"{kv_heads} heads · {dim} · {itemsize} bytes = {needed:,} are needed: " + (
                         "where is the rest? Outside of self, two caches would share it" if size < needed else
                         "what else is kept?"))


def generate_with(ckpt, plan: ShardPlan, cache_class, ids: list[int]) -> tuple[float, int, int]:
    """On a rank: how far the output in steps, through a cache of this class, is from one pass's, relative to its scale;
    the bytes that the cache holds in the end; the bytes that are needed."""
    with torch.inference_mode():
        model = load_model(ckpt, plan)
        cache, outputs = cache_class(ckpt.config.num_layers), []
        cuts, steps = [0, 3, len(ids) - 4, *range(len(ids) - 3, len(ids) + 1)], ContiguousKVCache(1, 0)
        steps.append = lambda sequence, *given: cache.append(*given)
        for start, stop in zip(cuts, cuts[1:]):
            step = steps.context([stop - start])
            outputs.append(model(torch.tensor(ids[start:stop]), step.positions, step))
        right = model(torch.tensor(ids), torch.arange(len(ids)), NoCache([len(ids)]))
    needed = 2 * ckpt.config.num_layers * len(ids) * len(model.shard.kv_heads) * plan.head_dim * 4
    return ((torch.cat(outputs) - right).abs().max() / right.abs().max()).item(), sum(held(cache).values()), needed
