"""The museum: every fault by name."""

from contextlib import AbstractContextManager
from difflib import get_close_matches

from tplab import patch
from tplab.errors import TplabError
from tplab.faults import drafts, experts, heads, kv, mask, paging, ranks, rope, sharding, waiting, windows
from tplab.faults.fault import Fault

MUSEUM: dict[str, Fault] = {fault.name: fault for room in (mask, sharding, rope, kv, paging, heads, ranks,
                                                           windows, experts, waiting, drafts)
                            for fault in room.FAULTS}

# For models with experts, windows, other norms or other rotations.
WING = tuple(fault.name for room in (windows, experts) for fault in room.FAULTS)

# Bugs of the engine from which this lab began, in the order in which the notebooks repair them.
SEED = ("nan_mask", "shard_dim1", "rope_missing")

# The staircase of the whole series: one bug per notebook, each visible with any model on any number of ranks.
STEPS = (*SEED, "decode_position_restarted", "slot_off_by_one", "head_random")


class FaultError(TplabError):
    """There is no fault of that name."""


def fault(name: str) -> Fault:
    """The fault called ``name``; a :class:`FaultError` with all names, then those most like it, if there is none."""
    if not isinstance(name, str) or name not in MUSEUM:
        near = " or ".join(get_close_matches(str(name), MUSEUM))
        raise FaultError(f"there is no fault {name!r}; the museum has {', '.join(MUSEUM)}"
                         + (f"; did you mean {near}?" if near else ""))
    return MUSEUM[name]


def applied(*names: str) -> AbstractContextManager[None]:
    """Break the engine with the named faults until the ``with`` block ends: here, and on the ranks of every pool."""
    return patch.applied(*map(fault, names))
