"""Which rank runs this code: its group, and the rank's `state`."""

import threading
from collections import UserDict

_thread = threading.local()
_process_group = None
_alone = None


def current():
    """The group of the running code: of its thread (logical ranks), else of its process, else a group of one."""
    group = getattr(_thread, "group", None) or _process_group
    return group if group is not None else alone()


def alone():
    """The group of code outside of any rank: rank 0 of 1."""
    global _alone
    if _alone is None:
        from tplab.ranks.group import Group

        _alone = Group(0, 1)
    return _alone


def inside_rank() -> bool:
    return getattr(_thread, "group", None) is not None or _process_group is not None


def set_thread_group(group) -> None:
    _thread.group = group


def set_process_group(group) -> None:
    global _process_group
    _process_group = group


def rank() -> int:
    """Number of the rank that runs this code; 0 outside of any rank."""
    return current().rank


def world_size() -> int:
    """Number of ranks that run this code together; 1 outside of any rank."""
    return current().size


class State(UserDict):
    """A dict on each rank that is kept between runs: ``state["model"] = model`` in one run, read in the next.

    It is pickled by its name, so in a function from a notebook cell it is the rank's own.
    """

    data = property(lambda self: current().state)  # type: ignore[assignment]

    def __init__(self):
        pass  # a UserDict would begin with a dict of its own

    def __repr__(self):
        return f"state of rank {rank()}: {self.data!r}"

    def __reduce__(self):
        return "state"


state = State()
