"""The World: where one rank stands among all, made from variables that may contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.ground.errors import MisconfigurationException


@dataclass(frozen=True)
class World:
    """The ranks of a run as one of them sees them.

    Raises:
        MisconfigurationException: numbers that cannot be together.
    """

    rank: int  #: of this process, 0 to size - 1
    size: int  #: processes on all nodes
    local_rank: int  #: of this process on its node, 0 to local_size - 1
    local_size: int  #: processes on this node
    node_rank: int  #: of this node, 0 to num_nodes - 1
    num_nodes: int
    address: str  #: host of rank 0, where the ranks meet
    port: int  #: 0 while nobody has chosen one

    def __post_init__(self) -> None:
        for name, value, limit_name, limit in (
            ("rank", self.rank, "world size", self.size),
            ("local rank", self.local_rank, "number of ranks on the node", self.local_size),
            ("node rank", self.node_rank, "number of nodes", self.num_nodes),
        ):
            if not 0 <= value < limit:
                raise MisconfigurationException(
                    f"{name} {value} with a {limit_name} of {limit}: ranks are counted from 0 to {limit - 1}"
                )
        if self.local_size > self.size or self.num_nodes > self.size:
            raise MisconfigurationException(
                f"a world size of {self.size} with {self.num_nodes} node(s) and {self.local_size} rank(s) on "
                "this one: the world has at least one rank on each node, and all of this node's"
            )
        if not 0 <= self.port <= 65535:
            raise MisconfigurationException(f"port {self.port}: choose a free one between 1024 and 65535")

    @classmethod
    def single(cls) -> World:
        """The world of one process."""
        return cls(0, 1, 0, 1, 0, 1, "127.0.0.1", 0)

    @property
    def is_zero(self) -> bool:
        """Whether this is global rank 0."""
        return self.rank == 0


def read_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The integer in an environment variable.

    Args:
        environ: the environment.
        name: of the variable.
        default: taken where the variable is not set; None: it has to be set.

    Raises:
        MisconfigurationException: not set, or no integer.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = "is not set" if text is None else f"is {text!r}"
        raise MisconfigurationException(
            f"the environment variable {name} {found}: it has to be an integer; "
            "set it, or remove the other variables of a launcher (RANK, LOCAL_RANK, ...)"
        ) from None


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
