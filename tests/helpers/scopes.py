"""A bug in a part of a run: a patch that is in force in prompts only, in decode steps only, or on rank 1 only."""

import threading

from tplab.patch import Patch, original
from tplab.ranks import rank

FORWARD = "tplab.model.decoder.TensorParallelCausalLM.forward"
_now = threading.local()


def _forward(self, input_ids, positions, context):
    _now.decodes = all((part[0] if isinstance(part, tuple) else part) == 1 for part in context.lengths)
    return original(FORWARD)(self, input_ids, positions, context)


HOLDS = {"prefill": lambda: not _now.decodes, "decode": lambda: _now.decodes, "rank 1": lambda: rank() == 1}
# What a diagnosis says of a scope; a decode step's own mistakes say it by their names.
SAID = {"prefill": ("in calls of several tokens only", "in first calls only"), "decode": ("in decode calls only",)}


def only(patches, scope):
    """The patches, each in force in this scope only."""
    def scoped(one):
        def replaced(*args, **options):
            return (one.replacement if HOLDS[scope]() else original(one.target))(*args, **options)
        return Patch(one.target, replaced)
    return [Patch(FORWARD, _forward), *map(scoped, patches)]
