"""Cluster environments: objects that say which rank a process is, for ``Trainer(plugins=...)`` and those who ask."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from typing import Protocol

from lockstep.cluster import slurm
from lockstep.cluster.detect import LOCAL, cluster_named, find
from lockstep.cluster.world import World, first_host, read_number
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_only

# -- environments --------------------------------------------------------------------------------------------


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
    """Ranks that lockstep starts by itself: the default; named, it lets no cluster count that may be around.

    A class that derives from it says by its own methods which rank this is, where ``LOCAL_RANK`` is set.
    """

    cluster = LOCAL
    _size: int | None = None

    @classmethod
    def detect(cls) -> bool:
        """True: it is there everywhere."""
        return True

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this is a derived class's, in a process that somebody has started as a rank."""
        return type(self) is not LightningEnvironment and "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``, or this machine."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``; 0 while nobody has chosen one."""
        return read_number(os.environ, "MASTER_PORT", default=0)

    def world_size(self) -> int:
        """What was set; else ``WORLD_SIZE``, or 1 where nothing was started."""
        return read_number(os.environ, "WORLD_SIZE", default=1) if self._size is None else self._size

    def set_world_size(self, size: int) -> None:
        """For who starts ranks by means of their own."""
        self._size = size

    def global_rank(self) -> int:
        """The rank that `rank_zero_only` goes by; right as soon as there is a Trainer."""
        return rank_zero_only.rank

    def set_global_rank(self, rank: int) -> None:
        """For who starts ranks by means of their own: `rank_zero_only` goes by it from here on."""
        rank_zero_only.rank = rank

    def local_rank(self) -> int:
        """``LOCAL_RANK``, or 0."""
        return read_number(os.environ, "LOCAL_RANK", default=0)

    def node_rank(self) -> int:
        """``NODE_RANK`` or ``GROUP_RANK``, or 0."""
        return read_number(os.environ, "NODE_RANK", default=read_number(os.environ, "GROUP_RANK", default=0))


class KnownEnvironment(ClusterEnvironment):
    """Ranks that a cluster has started which lockstep knows, and finds out by itself.

    Giving an instance to ``Trainer(plugins=...)`` or ``DDPStrategy(cluster_environment=...)`` lets nothing else count.

    Raises:
        MisconfigurationException: when asked in a process that the cluster did not start.
    """

    creates_processes_externally = True
    cluster = ""
    """Its name in `lockstep.cluster.detect`."""

    @classmethod
    def detect(cls) -> bool:
        """Whether the cluster started this process."""
        found = find(os.environ)
        return found is not None and found[0].name == cls.cluster

    def _world(self) -> World:
        found = find(os.environ, self.cluster)
        if found is None:
            raise MisconfigurationException(
                f"{type(self).__name__}: this process is the batch script of a SLURM job, not one of its tasks: start "
                "the script by srun, or ask after a Trainer has done so"
            )
        return found[1]

    @property
    def main_address(self) -> str:
        """The host of rank 0; ``MASTER_ADDR`` wins."""
        return os.environ.get("MASTER_ADDR") or self._world().address

    @property
    def main_port(self) -> int:
        """The port at which the ranks meet; ``MASTER_PORT`` wins."""
        return self._world().port

    def world_size(self) -> int:
        """Processes on all nodes."""
        return self._world().size

    def global_rank(self) -> int:
        """This process among all, from 0."""
        return self._world().rank

    def local_rank(self) -> int:
        """This process among those of its node, from 0."""
        return self._world().local_rank

    def node_rank(self) -> int:
        """This node, from 0."""
        return self._world().node_rank


class TorchElasticEnvironment(KnownEnvironment):
    """Ranks that ``torchrun`` started."""

    cluster = "torchelastic"

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``, or this machine."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")


class LSFEnvironment(KnownEnvironment):
    """Ranks that LSF's ``jsrun`` started."""

    cluster = "lsf"


class KubeflowEnvironment(KnownEnvironment):
    """Ranks that Kubeflow's PyTorchJob started, one in each pod."""

    cluster = "kubeflow"


class MPIEnvironment(KnownEnvironment):
    """Ranks that ``mpirun`` started; read from its variables, so that mpi4py is not needed."""

    cluster = "mpi"


class SLURMEnvironment(KnownEnvironment):
    """Ranks that SLURM's ``srun`` started.

    Args:
        auto_requeue: when SLURM sends ``requeue_signal``, save the run at the next boundary and put the job back into
            the queue; it goes on from there when it starts again.
        requeue_signal: the signal that asks for it; default SIGUSR1 (``#SBATCH --signal=USR1@90``).
    """

    cluster = "slurm"

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = signal.SIGUSR1 if requeue_signal is None else requeue_signal

    @staticmethod
    def job_name() -> str | None:
        """The job's name; None outside a job."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def is_in_job() -> bool:
        """Whether there is a job around this process, whoever started it."""
        return "SLURM_JOB_ID" in os.environ

    @staticmethod
    def job_id() -> int | None:
        """The job's number; None outside a job, and where somebody types at a shell in it."""
        if slurm.is_interactive(os.environ) or "SLURM_JOB_ID" not in os.environ:
            return None
        return read_number(os.environ, "SLURM_JOB_ID")

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """The first host of a list in SLURM's short form."""
        return first_host(nodes)


KNOWN: dict[str, type[ClusterEnvironment]] = {
    "torchelastic": TorchElasticEnvironment,
    "slurm": SLURMEnvironment,
    "lsf": LSFEnvironment,
    "kubeflow": KubeflowEnvironment,
    "mpi": MPIEnvironment,
    LOCAL: LightningEnvironment,
}


def environment_named(name: str) -> ClusterEnvironment:
    """The object that a name stands for in ``DDPStrategy(cluster_environment="SLURM")``.

    Raises:
        MisconfigurationException: there is no cluster of this name.
    """
    return KNOWN[cluster_named(name)]()


# -- ranks that an object of the user describes --------------------------------------------------------------


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


def describes_ranks(thing: object) -> bool:
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
