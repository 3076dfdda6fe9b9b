"""What the descriptions of all clusters share: a World out of variables that may contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.cluster.base import World, read_number
from lockstep.ground.errors import MisconfigurationException


def world_of(cluster: str, environ: Mapping[str, str], names: tuple[str, ...], way_out: str, **numbers: Any) -> World:
    """The World with these numbers.

    Args:
        cluster: as a sentence names it.
        environ: the environment.
        names: of the variables that the numbers were read from.
        way_out: the sentence that says what to do where they contradict each other.
        numbers: the fields of the World.

    Raises:
        MisconfigurationException: they contradict each other; with names, values and the way out.
    """
    try:
        return World(**numbers)
    except MisconfigurationException as error:
        said = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise MisconfigurationException(f"{cluster}: {said} cannot be together: {error}. {way_out}") from None


def node_of(rank: int, local_rank: int, local_size: int, size: int) -> tuple[int, int]:
    """The node of a rank, and the number of nodes, where a launcher tells neither.

    All nodes have as many ranks as this one, which were dealt out node by node (most launchers' way), or else one to
    each node in turn.

    Raises:
        MisconfigurationException: neither way leads to these numbers.
    """
    nodes, rest = divmod(size, max(local_size, 1))
    if not rest and rank % local_size == local_rank:
        return rank // local_size, nodes
    if not rest and rank // nodes == local_rank:
        return rank % nodes, nodes
    raise MisconfigurationException(
        f"rank {rank} of {size} is number {local_rank} of {local_size} on its node, so that the nodes do not have "
        "equal numbers of ranks: start as many on each"
    )


def port_of(environ: Mapping[str, str], *numbers: int | None) -> int | None:
    """The port at which the ranks meet: the user's, else one that follows from numbers which all ranks know.

    Args:
        environ: ``MASTER_PORT`` wins.
        numbers: of the job, of the step in it, of the attempt at it.

    Returns:
        a port from 15000 to 29999, below those that the system hands out by itself; None where no number is known.
    """
    if "MASTER_PORT" in environ:
        return read_number(environ, "MASTER_PORT")
    if not numbers or numbers[0] is None:
        return None
    job, step, attempt = [*(number or 0 for number in numbers), 0, 0][:3]
    return 15000 + (job + 2311 * step + 101 * attempt) % 15000


def missing(cluster: str, name: str, way_out: str) -> MisconfigurationException:
    """The error for a variable that a cluster has to set and has not set."""
    return MisconfigurationException(f"{cluster}: the environment variable {name} is not set: {way_out}")
