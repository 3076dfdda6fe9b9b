"""Where the ranks meet: the store on the host of rank 0, with errors that name the address and the way out."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from lockstep.cluster.base import World
from lockstep.cluster.slurm import attempt
from lockstep.ground.errors import MisconfigurationException

PATIENCE = timedelta(minutes=5)
"""How long a rank tries to reach rank 0, and rank 0 waits for the others; less where the group's timeout is less."""


def meet(
    world: World, timeout: timedelta, environ: Mapping[str, str] = os.environ, patience: timedelta = PATIENCE
) -> dist.Store:
    """The store through which the ranks of a world find each other; returns when all are there.

    Each attempt at a run has its own part of the store: a rank that is left over from an earlier one, on a node that
    was cut off say, and that reaches the store all the same, finds none of the others there.

    Args:
        world: with the address and the port; rank 0 listens there, or torchrun's agent.
        timeout: of what is asked of the store afterwards.
        environ: the environment.
        patience: of the meeting itself.

    Raises:
        MisconfigurationException: the port is taken.
        RuntimeError: rank 0 cannot be reached, or not all ranks came, in this time.
    """
    by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = world.is_zero and not by_agent
    patience = min(timeout, patience)
    try:
        store = dist.TCPStore(
            world.address,
            world.port,
            None if by_agent else world.size,
            is_master=listens,
            timeout=patience,
            wait_for_workers=not by_agent,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise _named(world, error, patience, listens) from None  # torch's own has pages of C++ frames
    store.set_timeout(timeout)
    lives = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0), attempt(environ)
    return dist.PrefixStore(f"lockstep/attempt{max(lives)}", store)


def _named(world: World, error: Exception, patience: timedelta, listens: bool) -> Exception:
    """The error with what it means."""
    place, seconds = f"MASTER_ADDR={world.address}, MASTER_PORT={world.port}", patience.total_seconds()
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text:
        return MisconfigurationException(
            f"port {world.port} of {socket.gethostname()}, where the ranks were to meet, is taken by another process "
            f"({place}): set MASTER_PORT to a free one, or leave it unset, and end what is left of an earlier run"
        )
    if listens and "clients joined" in text:
        return RuntimeError(
            f"not all of the {world.size} ranks came to rank 0 at {place} within {seconds:g} s ({_joined(text)}): "
            f"start the script on all {world.num_nodes} node(s), with the same MASTER_ADDR and MASTER_PORT"
        )
    reason = text.splitlines()[0][:200].rstrip(".")
    who = "rank 0 listens here and cannot be reached" if listens else f"rank {world.rank} could not reach rank 0"
    return RuntimeError(
        f"{who} at {place} within {seconds:g} s ({reason}): MASTER_ADDR has to be the host of rank 0 "
        f"as all nodes know it, where nothing blocks the port (this is {socket.gethostname()}); is rank 0 running?"
    )


def _joined(text: str) -> str:
    """torch's count of them."""
    return next((part.strip() for part in text.split(".") if "clients joined" in part), text)
