"""Ranks that torchrun (torchelastic) started, or anything that sets the same variables."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cluster.base import World, read_number
from lockstep.cluster.given import world_of


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
