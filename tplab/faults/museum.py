"""The museum: every fault by name."""

from contextlib import AbstractContextManager

from tplab import patch
from tplab.checks import did_you_mean
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


def fault(name: str) -> Fault:
    """The fault called ``name``; a :class:`TplabError` with those most like it, else all names, if there is none."""
    if not isinstance(name, str) or name not in MUSEUM:
        near = did_you_mean(name, MUSEUM) or f"; the museum has {', '.join(MUSEUM)}"
        raise TplabError(f"there is no fault {name!r}{near}")
    return MUSEUM[name]


def as_patches(patches) -> tuple[patch.Patch, ...]:
    """A list of faults, names of faults and patches → its patches.

    Raises PatchError if it is no such list, TplabError if the museum has no fault of that name.
    """
    if isinstance(patches, list | tuple):
        patches = [fault(entry) if isinstance(entry, str) else entry for entry in patches]
    return patch.as_patches(patches)


def applied(*names: str) -> AbstractContextManager[None]:
    """Break the engine with the named faults until the ``with`` block ends: here, and on the ranks of every pool."""
    return patch.applied(*map(fault, names))
