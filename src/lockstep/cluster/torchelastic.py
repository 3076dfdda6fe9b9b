"""Ranks that torchrun (torchelastic) started, `lockstep run`, or anything that sets the same variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from lockstep.cluster.world import World, read_number, world_of

STARTED = "LOCKSTEP_STARTED"
"""The variable with the words of ``lockstep run`` that chose the number of ranks: ``--devices 4 --nodes 2``."""
CAUSE = "LOCKSTEP_CAUSE"
"""The variable with the path at which the agent of ``lockstep run`` looks for what ended the ranks."""


def given_world(environ: Mapping[str, str]) -> World | None:
    """The world that ``torchrun`` describes in the environment; None if it did not start this process.

    ``RANK`` and ``LOCAL_RANK`` together say so: lockstep's own launch sets no ``RANK``.

    Raises:
        MisconfigurationException: variables that are missing, no numbers, or at odds with each other.
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
        "Start the script by torchrun, or remove these variables",
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
    """Whether every rank sees all devices of its node: `lockstep run` deals out none, as a cluster may."""
    return STARTED in environ


def promise_cause(environ: Mapping[str, str] = os.environ) -> None:
    """Tell the agent of ``lockstep run``, if there is one, that this process will hand it a cause when ranks fail."""
    path = environ.get(CAUSE)
    if path:
        with contextlib.suppress(OSError), open(f"{path}.promised", "w"):
            pass


def hand_cause(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Hand what ended the ranks to the agent of ``lockstep run``, which prints it as the last line on the screen.

    The first word on an attempt counts.

    Args:
        text: the line.
        environ: the environment of a rank, or of a process that a rank has started.

    Returns:
        whether there is such an agent; elsewhere the caller has to say it.
    """
    path = environ.get(CAUSE)
    if not path:
        return False
    beside = f"{path}.{os.getpid()}"
    try:
        with open(beside, "w") as file:
            file.write(text)
    except OSError:  # the agent has gone, and its folder with it
        return False
    with contextlib.suppress(OSError):
        os.link(beside, path)
    with contextlib.suppress(OSError):
        os.unlink(beside)
    return True
