"""Notebook 13: a race that is decided beforehand; what a rank's own rows save, measured."""

import weakref
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tplab.checkpoint import Checkpoint
from tplab.faults import fault
from tplab.model import NoCache, load_model
from tplab.patch import Patch, applied, original
from tplab.pool import RankPool
from tplab.ranks import rank, state, world_size
from tplab.shard import ShardPlan, split_evenly

_REDUCE = "tplab.shard.linear.RowParallelLinear.reduce"
LONG = 600  # seconds: it takes a second or two, and minutes where other programs take the cores
# In a layer, nothing is summed up, and no point is passed: its rows are not those of Hugging Face.
SUMMANDS = [Patch(_REDUCE, lambda self, partial: partial),
            *(Patch(f"tplab.model.{name}.point", lambda name, tensor: tensor) for name in ("attention", "mlp"))]


def sizes_here(tokens: int) -> list[int]:
    """How many of so many tokens each rank keeps."""
    return [len(part) for part in split_evenly(tokens, world_size())]


def scattered(answer: Callable, layer, own, sizes, cos, sin, context) -> torch.Tensor:
    """A layer of the engine's by a function that takes what the exercise ``my_sequence_parallel_layer`` takes, with
    :data:`SUMMANDS` in force."""
    return answer(own, sizes, layer.input_layernorm, lambda x: layer.self_attn(x, cos, sin, context),
                  layer.post_attention_layernorm, layer.mlp)


def decided(reduce: Callable, under_load: bool) -> Patch:
    """``reduce`` in the engine's place, with the race in it decided beforehand.

    Without load, a sum is complete as soon as it is started. Under load the other ranks are late: they enter a sum only
    after rank 0 has reached its wait for it.
    """
    def raced(self, partial):
        start, go = dist.all_reduce, torch.zeros(1)

        def let_others_enter():
            for other in range(1, world_size() if rank() == 0 and under_load else 1):
                dist.send(go, other)

        class Late:
            def __init__(self, work):
                self.wait = lambda: (let_others_enter(), work.wait())

        def all_reduce(t, async_op=False):
            if not async_op:
                let_others_enter()
            work = start(t, async_op=True)
            if async_op and under_load and rank() == 0:
                return Late(work)
            work.wait()
            return work

        if under_load and rank():
            dist.recv(go, 0)
        dist.all_reduce = all_reduce
        try:
            return reduce(self, partial)
        finally:
            dist.all_reduce = start

    return Patch(_REDUCE, raced)


def in_layers(names: Mapping[int, str], num_layers: int) -> Patch:
    """Each fault, by its layer, in that layer's sums alone."""
    def reduce(self, partial):
        call = state["calls"] = state.get("calls", -1) + 1
        name = names.get(call // 2 % num_layers)
        return (fault(name).patches[0].replacement if name else original(_REDUCE))(self, partial)

    return Patch(_REDUCE, reduce)


class PeakBytes(TorchDispatchMode):
    """The most bytes that what is computed inside has held at a time."""

    def __enter__(self):
        self.most, self._held = 0, {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for kept in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if (at := kept.data_ptr()) not in given and at not in self._held:  # else it is a view
                self._held[at] = kept.nbytes()
                weakref.finalize(kept, self._held.pop, at)
        self.most = max(self.most, sum(self._held.values()))
        return out


def peak_bytes(ckpt: Checkpoint, layer: Callable, tokens: int, dtype: torch.dtype, pool: RankPool
               ) -> dict[str, list[int]]:
    """The most bytes that each rank holds at a time while all layers compute one prompt: by the engine's own layers
    (``plain``), and by ``layer``, which takes what the exercise ``my_sequence_parallel_layer`` takes (``by rows``)."""
    plan = ShardPlan.from_config(ckpt.config, pool.size)
    peaks = pool.run(_peaks_on_rank, ckpt, plan, dtype, tokens, layer, timeout=LONG)
    return {name: [of_rank[name] for of_rank in peaks] for name in peaks[0]}


def _peaks_on_rank(ckpt: Checkpoint, plan: ShardPlan, dtype: torch.dtype, tokens: int, layer: Callable
                   ) -> dict[str, int]:
    with torch.inference_mode():
        model, context = load_model(ckpt, plan, dtype), NoCache([tokens])
        hidden, sizes = torch.randn(tokens, ckpt.config.hidden_size).to(dtype), sizes_here(tokens)
        tables = {kind: model.rotary(hidden, torch.arange(tokens), context.lengths, *kind)
                  for kind in set(model.rope_layer_types)}

        def plain():
            rows = hidden.clone()
            for decoder_layer, kind in zip(model.layers, model.rope_layer_types):
                rows = decoder_layer(rows, *tables[kind], context)

        def by_rows():
            with applied(*SUMMANDS):
                rows = hidden.split(sizes)[rank()].clone()
                for decoder_layer, kind in zip(model.layers, model.rope_layer_types):
                    rows = scattered(layer, decoder_layer, rows, sizes, *tables[kind], context)

        peaks = {}
        for name, run in {"plain": plain, "by rows": by_rows}.items():
            with PeakBytes() as peak:
                run()
            peaks[name] = peak.most
        return peaks
