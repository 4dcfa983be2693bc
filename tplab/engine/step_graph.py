"""Steps in which all sequences decode, repeated from a graph of their calls, as vLLM repeats CUDA graphs.

How many sequences there are decides which calls a step makes; so does how long the longest may be. The first step of
a kind is computed as always, the second one is recorded, every later one is repeated
(:mod:`tplab.kernels.graph`): the same functions with the same bits, without the Python between them. Whoever wants to
see or to change what happens inside, with a patch, a trace, a hook on a module, another parameter or module in the
place of one, gets steps as always.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import is_
from types import FunctionType

import torch

from tplab import patch
from tplab.cache import PagedKVCache, Segment, paged
from tplab.cache.standing import StandingContext, capacity_for
from tplab.kernels.graph import Recording
from tplab.kernels.packed import PackedWeight
from tplab.kernels.product import PACKABLE, SMALL
from tplab.model import TensorParallelCausalLM, attention, decoder, mlp, norm, rope
from tplab.model.trace import is_recording
from tplab.pool.shared_memory import SharedMemoryGroup
from tplab.ranks.context import current
from tplab.shard import ShardPlan, linear

_MOST_SEQUENCES = 64
_MOST_KINDS = 64  # of steps, that are kept
_OWNERS = attention, decoder, mlp, norm, rope, linear, paged


def may_be_repeated(config, plan: ShardPlan, dtype: torch.dtype) -> bool:
    """Whether all weights of a layer are large enough for loops, on every rank. (Whether this processor has them, and
    whether a step's calls can be noted, shows when it is computed.)"""
    return dtype in PACKABLE and all(
        min(len(shard.q_heads) * config.head_dim, len(shard.mlp)) * config.hidden_size >= SMALL for shard in plan.ranks)


class DecodeStep:
    """Steps of one kind: so many sequences, with room for so many keys each.

    Attributes:
        graph: what repeats it; None before it was recorded, and if it cannot be: ``refused`` says why.
        attempts: recordings that may still be refused: in the first one, functions may be made and tried.
    """

    def __init__(self, model: TensorParallelCausalLM, cache: PagedKVCache, batch: int, capacity: int):
        self.model, self.context = model, StandingContext(cache, batch, capacity)
        self.inputs = self.output = self.graph = self.refused = None
        self.attempts = 2

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """As the model's; what is returned is valid until the next step."""
        self.context.update(segments)
        inputs = self.model.embed(ids, positions, self.context)
        if self.graph is None:
            return self._record(inputs)
        for place, new in zip(self.inputs, inputs):
            place.copy_(new)
        self.graph.replay()
        return self.output

    def _record(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self.inputs = [new.clone() for new in inputs]
        with Recording() as recording:
            self.output = self.model.through_layers(*self.inputs, self.context)
        self.graph, self.refused = recording.graph, recording.refused
        self.attempts -= 1
        return self.output


class StepGraphs:
    """The steps of one runner, kind by kind."""

    def __init__(self, model: TensorParallelCausalLM, cache: PagedKVCache):
        self.model, self.cache = model, cache
        self.steps: OrderedDict[tuple, DecodeStep | None] = OrderedDict()  # None: met once
        self.hooks = [hooks for module in model.modules()
                      for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self.functions = list(_functions())
        self.contents = [(names, dict(names)) for names in _contents(model)]
        self.addresses = self._addresses()
        self.command, self.is_untouched = 0, False  # the last step's command, and whether the contents were these
        self.another = None  # the command whose next step need not be asked about

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor | None:
        """``[tokens, hidden]`` of this step, valid until the next one; None if it is to be computed as always."""
        if len(segments) > _MOST_SEQUENCES or (capacity := capacity_for(self.cache, segments)) is None \
                or not self._may_be_repeated():
            return None
        kind = len(segments), capacity, torch.get_num_threads()
        if kind not in self.steps:
            self.steps[kind] = None
            if len(self.steps) > _MOST_KINDS:
                self.steps.popitem(last=False)
            return None
        self.steps.move_to_end(kind)
        step = self.steps[kind]
        if step is None:
            step = self.steps[kind] = DecodeStep(self.model, self.cache, *kind[:2])
        return step.forward(ids, positions, segments) if step.graph or step.attempts else None

    def expect_another(self) -> None:
        """The next step follows in the same command, and nobody does anything in between."""
        self.another = self.command

    def _may_be_repeated(self) -> bool:
        """Whether nobody looks into a step, or has put something else in a place."""
        group = current()
        if not isinstance(group, SharedMemoryGroup):
            return False
        if group.command == self.another:
            self.another = None
            return self.is_untouched
        if patch.in_force() or is_recording() or any(self.hooks) or any(
                place.get(name) is not own for place, name, own in self.functions):
            return False
        if group.command != self.command + 1:  # else the step before was this rank's last work
            self.is_untouched = self.addresses == self._addresses() and all(
                len(names) == len(own) and all(map(is_, names.values(), own.values())) for names, own in self.contents)
        self.command = group.command
        return self.is_untouched

    def _addresses(self) -> list[int]:
        """Where the parameters lie: ``parameter.data = other`` moves one. A packed weight's memory stays."""
        return [parameter.data_ptr() for parameter in self.model.parameters()
                if not isinstance(parameter, PackedWeight)]


def _contents(model: TensorParallelCausalLM) -> Iterator[dict[str, object]]:
    """The attributes, parameters and modules of all that a step's layers consist of."""
    yield from (vars(model), model._modules)
    for module in (*model.layers.modules(), *model.norm.modules()):
        yield from (vars(module), module._parameters, module._modules)


def _functions() -> Iterator[tuple[dict, str, object]]:
    """``(names, name, function)`` of all that a step's layers consist of."""
    for owner in _OWNERS:
        for name, found in vars(owner).items():
            if isinstance(found, FunctionType):
                yield vars(owner), name, found
            elif isinstance(found, type) and found.__module__ == owner.__name__:
                yield from ((vars(found), inner, method) for inner, method in vars(found).items()
                            if isinstance(method, FunctionType))
