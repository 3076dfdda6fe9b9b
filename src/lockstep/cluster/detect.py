"""Find out, from environment and flags, which rank this process is and whether others must be started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.cluster import local, torchelastic
from lockstep.cluster.base import World, read_number
from lockstep.ground.errors import MisconfigurationException


@dataclass(frozen=True)
class Placement:
    """This process' world, and how it came about."""

    world: World
    launched: bool  #: the ranks are there; False: this process is local rank 0 and has to start the others
    cluster: str = "local"  #: who placed the ranks; anybody but "local" chose their devices too


def detect(environ: Mapping[str, str], devices: int | None = None, num_nodes: int = 1) -> Placement:
    """Where this process stands.

    Args:
        environ: the environment.
        devices: ranks on each node; None for ``devices="auto"``: as many as a launcher started, else 1.
        num_nodes: how many nodes.

    Raises:
        MisconfigurationException: flags and launcher contradict each other, or a variable is missing.

    Example:
        >>> placement = detect({}, devices=2)
        >>> placement.launched, placement.world.rank, placement.world.size
        (False, 0, 2)
    """
    given = torchelastic.given_world(environ)
    if given is not None:
        _compare(given, devices, num_nodes)
        return Placement(given, launched=True, cluster="torchelastic")
    if devices is None:
        started = local.is_started(environ)
        devices = max(read_number(environ, "WORLD_SIZE", default=1) // num_nodes, 1) if started else 1
    return Placement(local.local_world(environ, devices, num_nodes), launched=local.is_started(environ))


def early_rank(environ: Mapping[str, str]) -> int:
    """This process' rank as far as it can be told before the flags are known: 0 on global rank 0 only."""
    if "RANK" in environ:
        return read_number(environ, "RANK")
    return read_number(environ, "LOCAL_RANK", default=0) or read_number(environ, "NODE_RANK", default=0)


def _compare(given: World, devices: int | None, num_nodes: int) -> None:
    """Refuse flags that ask for another world than the one that torchrun made."""
    if devices is not None and devices * num_nodes != given.size:
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes} make {devices * num_nodes} rank(s), but torchrun "
            f"started {given.size} (WORLD_SIZE={given.size}): use devices={given.local_size}, "
            f"num_nodes={given.num_nodes}, or devices='auto', or start the script without torchrun"
        )
    if devices is None and num_nodes not in (1, given.num_nodes):
        raise MisconfigurationException(
            f"num_nodes={num_nodes}, but torchrun started {given.num_nodes}: use num_nodes={given.num_nodes}"
        )
