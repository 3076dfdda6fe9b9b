"""Where one rank stands among all: the World."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
