"""Cluster environments: objects that say which rank a process is, for ``Trainer(plugins=...)`` and those who ask."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from lockstep.cluster import torchelastic
from lockstep.cluster.base import World, read_number
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_only


class ClusterEnvironment(ABC):
    """Says which rank this process is among those that a cluster has started.

    Derive from it for a cluster that lockstep does not know, and give an instance to ``Trainer(plugins=...)``.

    Example::

        class Grid(ClusterEnvironment):
            creates_processes_externally = True
            main_address = property(lambda self: os.environ["GRID_HEAD"])
            main_port = property(lambda self: 29400)

            def world_size(self): return int(os.environ["GRID_TASKS"])
            def global_rank(self): return int(os.environ["GRID_TASK"])
            def local_rank(self): return self.global_rank() % 8
            def node_rank(self): return self.global_rank() // 8
    """

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether all ranks are there already; lockstep takes no other kind but `LightningEnvironment`."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """The host of rank 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """A port of that host, at which the ranks meet."""

    @staticmethod
    def detect() -> bool:
        """Whether this process runs in such a cluster; lockstep does not ask."""
        return False

    @abstractmethod
    def world_size(self) -> int:
        """Processes on all nodes."""

    @abstractmethod
    def global_rank(self) -> int:
        """This process among all, from 0."""

    @abstractmethod
    def local_rank(self) -> int:
        """This process among those of its node, from 0."""

    @abstractmethod
    def node_rank(self) -> int:
        """This node, from 0."""

    def set_world_size(self, size: int) -> None:  # noqa: B027, may be left as it is
        """Nothing: a cluster has dealt the ranks out."""

    def set_global_rank(self, rank: int) -> None:  # noqa: B027, may be left as it is
        """Nothing: a cluster has dealt the ranks out."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's flags against the ranks that there are.

        Raises:
            MisconfigurationException: they ask for another number.
        """
        if num_devices * num_nodes != self.world_size():
            raise MisconfigurationException(
                f"devices={num_devices}, num_nodes={num_nodes} make {num_devices * num_nodes} rank(s), but "
                f"{type(self).__name__}.world_size() is {self.world_size()}: use the numbers that were started"
            )

    def teardown(self) -> None:  # noqa: B027, may be left as it is
        """Clean up; lockstep does not call it."""


class LightningEnvironment(ClusterEnvironment):
    """Ranks that lockstep starts by itself: the default, which ``Trainer(plugins=...)`` need not name."""

    creates_processes_externally = False

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``, or this machine."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``; 0 while nobody has chosen one."""
        return read_number(os.environ, "MASTER_PORT", default=0)

    def world_size(self) -> int:
        """``WORLD_SIZE``; 1 where nothing was started."""
        return read_number(os.environ, "WORLD_SIZE", default=1)

    def global_rank(self) -> int:
        """The rank that `rank_zero_only` goes by; right as soon as there is a Trainer."""
        return rank_zero_only.rank

    def local_rank(self) -> int:
        """``LOCAL_RANK``, or 0."""
        return read_number(os.environ, "LOCAL_RANK", default=0)

    def node_rank(self) -> int:
        """``NODE_RANK`` or ``GROUP_RANK``, or 0."""
        return read_number(os.environ, "NODE_RANK", default=read_number(os.environ, "GROUP_RANK", default=0))


class TorchElasticEnvironment(ClusterEnvironment):
    """Ranks that ``torchrun`` started; lockstep finds this out by itself.

    Raises:
        MisconfigurationException: when asked in a process that torchrun did not start.
    """

    creates_processes_externally = True

    @staticmethod
    def detect() -> bool:
        """Whether torchrun started this process."""
        return torchelastic.given_world(os.environ) is not None

    def _world(self) -> World:
        world = torchelastic.given_world(os.environ)
        if world is None:
            raise MisconfigurationException(
                "TorchElasticEnvironment: torchrun did not start this process (RANK and LOCAL_RANK are not set): start "
                "the script by torchrun, or leave the plugin out"
            )
        return world

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``."""
        return self._world().address

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``."""
        return self._world().port

    def world_size(self) -> int:
        """``WORLD_SIZE``."""
        return self._world().size

    def global_rank(self) -> int:
        """``RANK``."""
        return self._world().rank

    def local_rank(self) -> int:
        """``LOCAL_RANK``."""
        return self._world().local_rank

    def node_rank(self) -> int:
        """``GROUP_RANK``."""
        return self._world().node_rank
