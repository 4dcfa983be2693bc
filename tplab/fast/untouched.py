"""Whether a rank's model is observed or was changed: the fast path is taken only if it is not.

With a patch, a trace, a hook, or a replaced function, module or parameter on any rank, the reference computes on all
ranks.
"""

from collections.abc import Iterator
from operator import is_
from types import FunctionType

import torch

from tplab import patch
from tplab.cache import paged
from tplab.engine import runner, sampler
from tplab.model import TensorParallelCausalLM, attention, decoder, mlp, norm, rope
from tplab.model.trace import is_recording
from tplab.ranks.context import current
from tplab.shard import embedding, linear

_OWNERS = attention, decoder, mlp, norm, rope, embedding, linear, paged, runner, sampler


class Watch:
    """What a model consisted of when it was loaded.

    ``disturbed``: since it was last set to False, this rank has done something else than steps.
    """

    def __init__(self, model: TensorParallelCausalLM):
        self.hooks = [hooks for module in model.modules()
                      for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self.functions = list(_functions())
        self.contents = [(names, dict(names)) for module in model.modules()
                         for names in (vars(module), module._parameters, module._modules)]
        self.command, self.untouched, self.disturbed = None, False, True

    def is_untouched(self) -> bool:
        """Whether no rank's model is observed or changed.

        Ranks agree on the answer whenever they have done something else since the last step; in between, only the
        patches can change, which the pool sends to all.
        """
        group = current()
        if self.command is None or group.command - self.command > 1:
            self.disturbed = True
            self.untouched = group.all_agree(self._is_unobserved() and self._is_as_loaded())
        self.command = group.command
        return self.untouched and not patch.in_force()

    def _is_unobserved(self) -> bool:
        return not (is_recording() or any(self.hooks) or torch.nn.modules.module._has_any_global_hook())

    def _is_as_loaded(self) -> bool:
        return all(place.get(name) is function for place, name, function in self.functions) and all(
            len(now) == len(then) and all(map(is_, now.values(), then.values())) for now, then in self.contents)


def _functions() -> Iterator[tuple[dict, str, object]]:
    """``(names, name, function)`` of all that a forward pass consists of."""
    for owner in _OWNERS:
        for name, member in vars(owner).items():
            if isinstance(member, FunctionType):
                yield vars(owner), name, member
            elif isinstance(member, type) and member.__module__ == owner.__name__:
                yield from ((vars(member), inner, method) for inner, method in vars(member).items()
                            if isinstance(method, FunctionType))
