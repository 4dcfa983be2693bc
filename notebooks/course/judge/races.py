"""Notebook 13: a race that is decided beforehand; what overlap and a rank's own rows cost and save, measured."""

import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.exercises.sequence_parallel import SUMMANDS, scattered, sizes_here
from tplab.checkpoint import Checkpoint
from tplab.faults import fault
from tplab.model import NoCache, load_model
from tplab.patch import Patch, applied, original
from tplab.pool import RankPool
from tplab.ranks import barrier, rank, state, world_size
from tplab.shard import ShardPlan

_REDUCE = "tplab.shard.linear.RowParallelLinear.reduce"
LONG = 600  # seconds: measurements take a second or two, and minutes where other programs take the cores
ROUNDS = 25


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


def linked_seconds(pool: RankPool, parts: Sequence[int]) -> dict:
    """Seconds of a product alone, and in parts beside sums over a link that needs no core: ``product``, ``latency``,
    ``transfer``, and by number of parts. Nothing is summed up: a thread waits as long as the link would take."""
    return pool.run(_linked, list(parts), timeout=LONG)[0]


def _linked(parts: list[int]) -> dict:
    if rank():
        return {}
    x, weight, out = torch.randn(512, 1024), torch.randn(1024, 1024), torch.empty(512, 1024)
    product = min(_clocked(lambda: torch.mm(x, weight.T, out=out)) for _ in range(ROUNDS))
    latency, transfer = product / 20, product

    def in_parts(count):
        sums = []
        for rows, into in zip(x.chunk(count), out.chunk(count)):
            torch.mm(rows, weight.T, out=into)
            sums.append(link.submit(time.sleep, latency + transfer / count))
        for each in sums:
            each.result()

    with ThreadPoolExecutor(1) as link:  # one sum after the other
        turns = [{n: _clocked(lambda n=n: in_parts(n)) for n in parts} for _ in range(ROUNDS)]
    return {"product": product, "latency": latency, "transfer": transfer, **{
        n: min(turn[n] for turn in turns) for n in parts}}


def _clocked(what: Callable) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def overlap_seconds(pool: RankPool, tokens: int, inputs: int, outputs: int, parts: Sequence[int]) -> dict:
    """Seconds of a row-parallel product and of its sum by gloo: ``product``, ``sum``, ``latency`` (the sum of one
    number), and by number of parts with the sum of one part under way beside the product of the next."""
    return max(pool.run(_overlapped, tokens, inputs, outputs, list(parts), timeout=LONG),
               key=lambda found: found["product"])


def _overlapped(tokens: int, inputs: int, outputs: int, parts: list[int]) -> dict:
    x, weight, out = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.zeros(tokens, outputs)

    def in_parts(count):
        works = []
        for rows, into in zip(x.chunk(count), out.chunk(count)):
            torch.mm(rows, weight.T, out=into)
            works.append(dist.all_reduce(into, async_op=True))
        for work in works:
            work.wait()

    return seconds({"product": lambda: torch.mm(x, weight.T, out=out), "sum": lambda: dist.all_reduce(out),
                    "latency": lambda: dist.all_reduce(out[:1, :1].clone()),
                    **{n: lambda n=n: in_parts(n) for n in parts}}, min)


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
