"""The limit of open files of this process. Each rank connects to every other, and node 0 to every node."""

from __future__ import annotations

import contextlib
import os
import resource

from lockstep.ground.errors import MisconfigurationException

SPARE = 64
"""Number of other files that a rank opens: store, pipes of loader workers, checkpoints, logs."""


def raise_limit() -> bool:
    """Raise this process' limit of open files to the hard limit. Return False if it is there already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return True
    return False


def provide_files(ranks: int) -> None:
    """Make sure that this rank can connect to all others. Raise its limit of open files if necessary.

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
            f"this process may open {hard} files (`ulimit -Hn`) and has opened {there}, but each of {ranks} ranks "
            f"connects to all others: raise the limit to {wanted} on all nodes (limits.conf, a service's LimitNOFILE=, "
            "a container's --ulimit nofile=)."
        )
