"""Ranks that an object of the user's describes, with the methods of a Lightning ``ClusterEnvironment``."""

from __future__ import annotations

from typing import Any, Protocol

from lockstep.cluster.base import World
from lockstep.ground.errors import MisconfigurationException


class DescribesRanks(Protocol):
    """What has to be told of ranks that a cluster has started; asked in the Trainer's constructor and calls."""

    creates_processes_externally: bool
    main_address: str
    main_port: int

    def world_size(self) -> int: ...

    def global_rank(self) -> int: ...

    def local_rank(self) -> int: ...

    def node_rank(self) -> int: ...


NAMES = ("creates_processes_externally", "main_address", "main_port")
METHODS = ("world_size", "global_rank", "local_rank", "node_rank")


def describes_ranks(thing: Any) -> bool:
    """Whether an object has everything that :class:`DescribesRanks` names; none of it is asked yet."""
    kind = type(thing)
    return all(hasattr(kind, name) for name in NAMES) and all(callable(getattr(kind, name, None)) for name in METHODS)


def described_world(environment: DescribesRanks, devices: int | None, num_nodes: int) -> World:
    """The World that an environment describes.

    Args:
        environment: the user's; its ranks are there.
        devices: ranks on each node that the flags ask for; None: as many as there are.
        num_nodes: as in ``Trainer(num_nodes=...)``; each node has an equal part of the ranks.

    Raises:
        MisconfigurationException: numbers that cannot be together.
    """
    size = environment.world_size()
    if size % num_nodes:
        raise MisconfigurationException(
            f"Trainer(plugins={type(environment).__name__}(), num_nodes={num_nodes}): its world_size() of {size} does "
            "not divide among the nodes: each has to have as many ranks as the others."
        )
    if devices is not None and devices * num_nodes != size:
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes} make {devices * num_nodes} rank(s), but "
            f"{type(environment).__name__}.world_size() is {size}: give devices={size // num_nodes} or devices='auto'"
        )
    return World(
        rank=environment.global_rank(),
        size=size,
        local_rank=environment.local_rank(),
        local_size=size // num_nodes,
        node_rank=environment.node_rank(),
        num_nodes=num_nodes,
        address=environment.main_address,
        port=environment.main_port,
    )
