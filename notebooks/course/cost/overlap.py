"""Notebook 13: a race that is decided beforehand; what overlap and a rank's own rows cost and save, measured."""

import statistics
import time
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
from tplab.ranks import barrier, rank, state, world_size
from tplab.shard import ShardPlan, split_evenly

_REDUCE = "tplab.shard.linear.RowParallelLinear.reduce"
LONG = 600  # seconds: measurements take a second or two, and minutes where other programs take the cores
# In a layer, nothing is summed up, and no point is passed: its rows are not those of Hugging Face.
SUMMANDS = [Patch(_REDUCE, lambda self, partial: partial),
            *(Patch(f"tplab.model.{name}.point", lambda name, tensor: tensor) for name in ("attention", "mlp"))]
ROUNDS = 25


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


def _clocked(what: Callable) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def seconds(timed: Mapping[object, Callable], of: Callable[[list[float]], float]) -> dict:
    """On a rank: seconds of each, begun by all ranks together, as ``of`` sums up those of all rounds.

    In every round each has its turn, so what slows the machine down for a while slows all of them down. ``min`` is
    steady where one takes less than a time slice of the system, the median where one takes longer.
    """
    times = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, what in timed.items():
            barrier()
            times[name].append(_clocked(what))
    return {name: of(found) for name, found in times.items()}


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


def layers_plain_and_scattered(ckpt: Checkpoint, layer: Callable, tokens: int, dtype: torch.dtype, pool: RankPool
                               ) -> dict[str, tuple[float, list[int]]]:
    """All layers over one prompt, the engine's own and by ``layer``, which takes what the exercise
    ``my_sequence_parallel_layer`` takes (``plain``, ``by rows``): seconds, and on each rank the peak of bytes. And the
    seconds of the norms and additions of all rows (``row by row``) and of a latency."""
    plan = ShardPlan.from_config(ckpt.config, pool.size)
    timed, peaks = zip(*pool.run(_through_layers, ckpt, plan, dtype, tokens, layer, timeout=LONG))
    return {name: (max(one[name] for one in timed), [one[name] for one in peaks if name in one]) for name in timed[0]}


def _through_layers(ckpt: Checkpoint, plan: ShardPlan, dtype: torch.dtype, tokens: int, layer: Callable
                    ) -> tuple[dict[str, float], dict[str, int]]:
    """On a rank: seconds of all layers, plain and by rows, of norms and additions over all rows, and of a latency; and
    of both ways through the layers the peak of bytes."""
    with torch.inference_mode():
        model, context = load_model(ckpt, plan, dtype), NoCache([tokens])
        hidden, sizes = torch.randn(tokens, ckpt.config.hidden_size).to(dtype), sizes_here(tokens)
        tables = {kind: model.rotary(hidden, torch.arange(tokens), context.lengths, *kind)
                  for kind in set(model.rope_layer_types)}

        def plain():
            own = hidden.clone()
            for one, kind in zip(model.layers, model.rope_layer_types):
                own = one(own, *tables[kind], context)

        def by_rows():
            with applied(*SUMMANDS):
                own = hidden.split(sizes)[rank()].clone()
                for one, kind in zip(model.layers, model.rope_layer_types):
                    own = scattered(layer, one, own, sizes, *tables[kind], context)

        def row_by_row():
            for one in model.layers:
                one.input_layernorm(hidden) + hidden, one.post_attention_layernorm(hidden) + hidden

        peaks, ways = {}, {"plain": plain, "by rows": by_rows}
        for name, run in ways.items():
            with PeakBytes() as peak:
                run()
            peaks[name] = peak.most
        return seconds({**ways, "row by row": row_by_row, "latency": barrier}, statistics.median), peaks
