"""Detection of ranks started by torchrun (torchelastic), `lockstep run`, or launchers that set the same variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from lockstep.cluster.world import World, read_number, world_of

STARTED = "LOCKSTEP_STARTED"
"""Environment variable with the options of ``lockstep run`` that set the number of ranks: ``--devices 4 --nodes 2``."""
CAUSE = "LOCKSTEP_CAUSE"
"""Environment variable with the path where the agent of ``lockstep run`` expects the cause of a failure."""


def given_world(environ: Mapping[str, str]) -> World | None:
    """Return the World (ranks and nodes) that ``torchrun`` describes in the environment; None without ``torchrun``.

    ``RANK`` and ``LOCAL_RANK`` together identify torchrun. lockstep's own launcher does not set ``RANK``.

    Raises:
        MisconfigurationException: variables are missing, are not numbers, or contradict each other.
    """
    if not ({"RANK", "LOCAL_RANK"} <= environ.keys() or "TORCHELASTIC_RUN_ID" in environ):
        return None
    size = read_number(environ, "WORLD_SIZE")
    local_size = read_number(environ, "LOCAL_WORLD_SIZE", default=size)
    nodes = -(-size // max(local_size, 1))
    return world_of(
        "torchrun",
        environ,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT"),
        "Start the script with torchrun, or remove these variables",
        rank=read_number(environ, "RANK"),
        size=size,
        local_rank=read_number(environ, "LOCAL_RANK"),
        local_size=local_size,
        node_rank=read_number(environ, "GROUP_RANK", default=0),
        num_nodes=read_number(environ, "GROUP_WORLD_SIZE", default=nodes),
        address=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=read_number(environ, "MASTER_PORT"),
    )


def sees_all_devices(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this rank sees all devices of its node, because `lockstep run` started it."""
    return STARTED in environ


def promise_cause(environ: Mapping[str, str] = os.environ) -> None:
    """Announce to the agent of ``lockstep run`` that this process will report the cause if it fails.

    Without such an agent, do nothing.
    """
    path = environ.get(CAUSE)
    if path:
        with contextlib.suppress(OSError), open(f"{path}.promised", "w"):
            pass


def hand_cause(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Report ``text``, the cause of a failure, to the agent of ``lockstep run``, which prints it as the last line.

    Args:
        text: the cause, in one line.
        environ: environment of a rank, or of a child process of a rank.

    Returns:
        True if there is such an agent. Otherwise the caller has to print the line.
    """
    path = environ.get(CAUSE)
    if not path:
        return False
    own = f"{path}.{os.getpid()}"
    try:
        with open(own, "w") as file:
            file.write(text)
    except OSError:  # the agent has ended, and its folder is gone
        return False
    # a link does not replace an existing file: the first cause of an attempt counts
    with contextlib.suppress(OSError):
        os.link(own, path)
    with contextlib.suppress(OSError):
        os.unlink(own)
    return True
