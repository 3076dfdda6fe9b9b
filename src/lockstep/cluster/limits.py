"""The limit of open files of this process: each rank has a connection to every other, and node 0 to every node."""

from __future__ import annotations

import contextlib
import os
import resource

from lockstep.ground.errors import MisconfigurationException

SPARE = 64
"""Files that a rank opens besides: its store, loader workers' pipes, checkpoints, logs."""


def raise_limit() -> bool:
    """Let this process open as many files as its hard limit allows; False where it does already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return True
    return False


def provide_files(ranks: int) -> None:
    """See that this rank can connect to all others, by raising its limit of open files where it may.

    Args:
        ranks: of the run.

    Raises:
        MisconfigurationException: the hard limit is too low; torch would fail in the middle of connecting.
    """
    try:
        there = len(os.listdir("/proc/self/fd"))
    except OSError:
        there = 32
    wanted = there + ranks + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    raise_limit()
    if hard != resource.RLIM_INFINITY and hard < there + ranks:
        raise MisconfigurationException(
            f"each of {ranks} ranks connects to all others, and this process may open {hard} files (`ulimit -Hn`), "
            f"{there} of them open: raise it to {wanted} on all nodes (limits.conf, a service's LimitNOFILE=, a "
            "container's --ulimit nofile=)."
        )
