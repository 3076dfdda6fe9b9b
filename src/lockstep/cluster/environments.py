"""Cluster environments: objects that describe this process' rank, for ``Trainer(plugins=...)``."""

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
    """Base class of objects that report this process' rank on a cluster.

    Derive from it for a cluster that lockstep does not recognize, and pass an instance to ``Trainer(plugins=...)``.

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
        """True if all ranks are running already, so that lockstep starts none.

        If it is False, lockstep accepts only a `LightningEnvironment`.
        """

    @property
    @abstractmethod
    def main_address(self) -> str:
        """The host of rank 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """The port on the host of rank 0 at which the ranks connect."""

    @staticmethod
    def detect() -> bool:
        """Return True if this process runs on the cluster of this class. lockstep does not call this method."""
        return False

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of processes on all nodes."""

    @abstractmethod
    def global_rank(self) -> int:
        """Return the rank of this process among all processes, from 0."""

    @abstractmethod
    def local_rank(self) -> int:
        """Return the rank of this process on its node, from 0."""

    @abstractmethod
    def node_rank(self) -> int:
        """Return the index of this node, from 0."""

    def set_world_size(self, size: int) -> None:  # noqa: B027, may be left as it is
        """Do nothing: the cluster has assigned the ranks.

        Args:
            size: number of processes on all nodes.
        """

    def set_global_rank(self, rank: int) -> None:  # noqa: B027, may be left as it is
        """Do nothing: the cluster has assigned the ranks.

        Args:
            rank: rank of this process among all, from 0.
        """

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise an error if the Trainer's flags do not match the number of ranks that the cluster has started.

        Args:
            num_devices: devices on each node.
            num_nodes: number of nodes.

        Raises:
            MisconfigurationException: the flags ask for a different number of ranks.
        """
        if num_devices * num_nodes != self.world_size():
            raise MisconfigurationException(
                f"devices={num_devices}, num_nodes={num_nodes} make {num_devices * num_nodes} rank(s), but "
                f"{type(self).__name__}.world_size() is {self.world_size()}: choose devices and num_nodes with the "
                f"product {self.world_size()}"
            )

    def teardown(self) -> None:  # noqa: B027, may be left as it is
        """Release resources. lockstep does not call this method."""


class LightningEnvironment(ClusterEnvironment):
    """Cluster environment for ranks that lockstep starts itself. It is the default without a cluster.

    Passed explicitly, it disables the detection of clusters.

    The methods of a derived class determine the rank where ``LOCAL_RANK`` is set.

    Raises:
        MisconfigurationException: a variable that a method reads, such as ``WORLD_SIZE``, is not an integer.
    """

    cluster = LOCAL
    _size: int | None = None

    @classmethod
    def detect(cls) -> bool:
        """Return True, because lockstep can start ranks on any machine."""
        return True

    @property
    def creates_processes_externally(self) -> bool:
        """True for a derived class in a process that was started as a rank; False in all other cases."""
        return type(self) is not LightningEnvironment and "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """The host of rank 0: ``MASTER_ADDR``, or else this machine."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port on the host of rank 0: ``MASTER_PORT``, or 0 until a port is chosen."""
        return read_number(os.environ, "MASTER_PORT", default=0)

    def world_size(self) -> int:
        """Return the number of processes: from `set_world_size`, else ``WORLD_SIZE``, else 1."""
        return read_number(os.environ, "WORLD_SIZE", default=1) if self._size is None else self._size

    def set_world_size(self, size: int) -> None:
        """Set the number of processes. Call it if you start the ranks by other means.

        Args:
            size: number of processes on all nodes.
        """
        self._size = size

    def global_rank(self) -> int:
        """Return ``rank_zero_only.rank``, which is the global rank once a Trainer exists."""
        return rank_zero_only.rank

    def set_global_rank(self, rank: int) -> None:
        """Set ``rank_zero_only.rank``. Call it if you start the ranks by other means."""
        rank_zero_only.rank = rank

    def local_rank(self) -> int:
        """Return the rank of this process on its node: ``LOCAL_RANK``, or else 0."""
        return read_number(os.environ, "LOCAL_RANK", default=0)

    def node_rank(self) -> int:
        """Return the index of this node: ``NODE_RANK``, else ``GROUP_RANK``, else 0."""
        return read_number(os.environ, "NODE_RANK", default=read_number(os.environ, "GROUP_RANK", default=0))


class KnownEnvironment(ClusterEnvironment):
    """Base class of environments for the clusters that lockstep recognizes. The cluster has started the ranks.

    lockstep detects such a cluster by itself, without an environment object.

    Pass an instance to ``Trainer(plugins=...)`` or ``DDPStrategy(cluster_environment=...)`` to allow no other cluster.

    Raises:
        MisconfigurationException: when used in a process that the cluster did not start.
    """

    creates_processes_externally = True
    cluster = ""
    """Name of the cluster in `lockstep.cluster.detect`."""

    @classmethod
    def detect(cls) -> bool:
        """Return True if the cluster started this process."""
        found = find(os.environ)
        return found is not None and found[0].name == cls.cluster

    def _world(self) -> World:
        found = find(os.environ, self.cluster)
        if found is None:
            raise MisconfigurationException(
                f"{type(self).__name__}: this process is the batch script of a SLURM job, not one of its tasks: start "
                "the script with srun, or use this object only after a Trainer has started the tasks"
            )
        return found[1]

    @property
    def main_address(self) -> str:
        """The host of rank 0. ``MASTER_ADDR`` takes precedence."""
        return os.environ.get("MASTER_ADDR") or self._world().address

    @property
    def main_port(self) -> int:
        """The port on the host of rank 0 at which the ranks connect. ``MASTER_PORT`` takes precedence."""
        return self._world().port

    def world_size(self) -> int:
        """Return the number of processes on all nodes."""
        return self._world().size

    def global_rank(self) -> int:
        """Return the rank of this process among all processes, from 0."""
        return self._world().rank

    def local_rank(self) -> int:
        """Return the rank of this process on its node, from 0."""
        return self._world().local_rank

    def node_rank(self) -> int:
        """Return the index of this node, from 0."""
        return self._world().node_rank


class TorchElasticEnvironment(KnownEnvironment):
    """Cluster environment for ranks that ``torchrun`` started."""

    cluster = "torchelastic"

    @property
    def main_address(self) -> str:
        """The host of rank 0: ``MASTER_ADDR``, or else this machine."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")


class LSFEnvironment(KnownEnvironment):
    """Cluster environment for ranks that LSF's ``jsrun`` started."""

    cluster = "lsf"


class KubeflowEnvironment(KnownEnvironment):
    """Cluster environment for ranks that Kubeflow's PyTorchJob started, one in each pod."""

    cluster = "kubeflow"


class MPIEnvironment(KnownEnvironment):
    """Cluster environment for ranks that ``mpirun`` started. It reads mpirun's variables, and does not need mpi4py."""

    cluster = "mpi"


class SLURMEnvironment(KnownEnvironment):
    """Cluster environment for ranks that SLURM's ``srun`` started.

    Args:
        auto_requeue: when SLURM sends ``requeue_signal``, save the run at the next boundary and requeue the job. The
            run resumes when the job starts again.
        requeue_signal: the signal that requests saving and requeuing. Default: SIGUSR1 (``#SBATCH --signal=USR1@90``).

    Raises:
        MisconfigurationException: the rank is requested in a process that is not a task of the job, or a variable of
            SLURM is malformed.

    Example::

        Trainer(num_nodes=2, devices=4, plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)])
    """

    cluster = "slurm"

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = signal.SIGUSR1 if requeue_signal is None else requeue_signal

    @staticmethod
    def job_name() -> str | None:
        """Return the SLURM job's name, or None outside a job."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def is_in_job() -> bool:
        """Return True if this process runs inside a SLURM job, whether or not srun started it."""
        return "SLURM_JOB_ID" in os.environ

    @staticmethod
    def job_id() -> int | None:
        """Return the SLURM job's id. Return None outside a job, or in an interactive shell of a job."""
        if slurm.is_interactive(os.environ) or "SLURM_JOB_ID" not in os.environ:
            return None
        return read_number(os.environ, "SLURM_JOB_ID")

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """Return the first host in a compressed host list from SLURM: ``"node1"`` for ``"node[1-3]"``.

        Args:
            nodes: value of ``SLURM_NODELIST``.
        """
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
    """Return the environment object for a cluster's name, as in ``DDPStrategy(cluster_environment="SLURM")``.

    Raises:
        MisconfigurationException: there is no cluster of this name.
    """
    return KNOWN[cluster_named(name)]()


# -- ranks described by the user's objects -------------------------------------------------------------------


class DescribesRanks(Protocol):
    """Protocol of a user's cluster environment: the attributes that lockstep reads, whatever its base class is."""

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
    """Return True if an object has all attributes of :class:`DescribesRanks`, without evaluating properties."""
    kind = type(thing)
    return all(hasattr(kind, name) for name in NAMES) and all(callable(getattr(kind, name, None)) for name in METHODS)


def described_world(environment: DescribesRanks, devices: int | None, num_nodes: int) -> World:
    """Return the `World` (ranks, nodes and rendezvous of the run) that a user's cluster environment describes.

    Args:
        environment: the user's environment, whose ranks are running.
        devices: number of ranks on each node that the flags ask for; None: any number.
        num_nodes: as in ``Trainer(num_nodes=...)``. All nodes have the same number of ranks.

    Raises:
        MisconfigurationException: the numbers contradict each other.
    """
    size = environment.world_size()
    if size % num_nodes:
        raise MisconfigurationException(
            f"Trainer(plugins={type(environment).__name__}(), num_nodes={num_nodes}): world_size() is {size}, which "
            "is not divisible by num_nodes: start the same number of ranks on each node."
        )
    if devices is not None and devices * num_nodes != size:
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes} make {devices * num_nodes} rank(s), but "
            f"{type(environment).__name__}.world_size() is {size}: use devices={size // num_nodes} or devices='auto'"
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
