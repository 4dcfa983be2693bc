"""What the system must allow for a pool to start: a sentence that names what is missing. Errors speak of sockets."""

import math
import os
import resource
import socket

import psutil


def why_not(size: int) -> str | None:
    """What would keep a pool of ``size`` ranks from starting, if that can be told before; else None.

    Half a request, cut short by a lack of files, would end the fork server, and all ranks with it.
    """
    need, (used, most) = 6 * size + 14, _room(resource.RLIMIT_NOFILE, _open_files)  # 15 for two, more while they start
    if used + need > most:
        return (f"a pool of {size} needs about {need} more open files, but this process has {used} of the {most} "
                "that it may have; raise the limit with ulimit -n 1024 and start again")
    if not _loopback_is_up():
        return "the ranks meet over the loopback interface, and it is down; bring it up: ip link set lo up"
    return None


def too_few_threads(size: int) -> str | None:
    """The reason why a pool of ``size`` ranks has not started, if it is this one: to count takes a while."""
    need, (used, most) = 5 * size + 3, _room(resource.RLIMIT_NPROC, _threads_of_user)  # 12 for two, and one that starts
    if used + need <= most:
        return None
    return (f"a pool of {size} needs about {need} more processes and threads, but this user has {used} of the {most} "
            "that are allowed; raise the limit (ulimit -u) or end other programs")


def _room(limit: int, count) -> tuple[int, float]:
    """How much is taken of a limit, and the limit."""
    most = resource.getrlimit(limit)[0]
    return (0, math.inf) if most == resource.RLIM_INFINITY else (count(), most)


def _open_files() -> int:
    return psutil.Process().num_fds()


def _threads_of_user() -> int:
    if os.getuid() == 0:
        return 0  # Linux counts root's, but refuses it none
    return sum(one.info["num_threads"] or 0 for one in psutil.process_iter(["uids", "num_threads"])
               if one.info["uids"] and one.info["uids"].real == os.getuid())


def _loopback_is_up() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:
        return False
    return True
