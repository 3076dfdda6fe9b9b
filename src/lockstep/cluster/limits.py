"""The limit on this process' open files, which include its connections to other processes.

A rank has a connection to every other rank, and node 0's supervisor has one to every node.
"""

from __future__ import annotations

import contextlib
import os
import resource

from lockstep.ground.errors import MisconfigurationException

SPARE = 64
"""Number of other files that a rank opens: store, pipes of loader workers, checkpoints, logs."""


def raise_limit() -> bool:
    """Raise this process' limit on open files to the hard limit. Return True if the limit changed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return True
    return False


def provide_files(ranks: int) -> None:
    """Raise the limit on open files if this rank needs more of them to connect to all other ranks.

    Args:
        ranks: number of ranks of the run.

    Raises:
        MisconfigurationException: the hard limit is too low. Torch would fail while connecting.
    """
    try:
        there = len(os.listdir("/proc/self/fd"))
    except OSError:
        # a system without /proc
        there = 32
    wanted = there + ranks + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    raise_limit()
    if hard != resource.RLIM_INFINITY and hard < there + ranks:
        raise MisconfigurationException(
            f"the limit on open files is too low: this process may open {hard} files (`ulimit -Hn`) and has opened "
            f"{there}, but each of {ranks} ranks connects to all others: raise the limit to {wanted} on all nodes "
            "(limits.conf, a service's LimitNOFILE=, a container's --ulimit nofile=)."
        )
