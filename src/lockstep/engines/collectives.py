"""Collectives that also work in a run of one process, and the mapping from ranks to replicas of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.cluster.world import World
from lockstep.data.source import Replicas
from lockstep.ground import comm
from lockstep.ground.agreement import ConsensusFlags
from lockstep.ground.comm import on_host, packed, unpacked
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import does
from lockstep.ground.tree import tree_leaves, tree_map


@dataclass(frozen=True)
class ReplicaMap:
    """Mapping from ranks to replicas of the model. The ranks of one replica load the same batches.

    Each rank is a separate replica, unless several ranks share one copy of the model (tensor parallelism, pipeline
    stages).

    Attributes:
        index: the replica of this rank.
        count: number of replicas.
        of_rank: the replica of each rank.
    """

    index: int
    count: int
    of_rank: tuple[int, ...]

    @classmethod
    def each(cls, world: World) -> ReplicaMap:
        """Return the mapping in which every rank is a separate replica."""
        return cls(world.rank, world.size, tuple(range(world.size)))

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each replica. The other ranks of the replica have the same values."""
        return [self.of_rank.index(replica) for replica in range(self.count)]

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """For each position in a replica, the ranks at this position. All replicas must have the same size."""
        return list(zip(*self.rows, strict=True))

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """For each replica, the ranks that belong to it."""
        return [self.ranks([replica]) for replica in range(self.count)]

    def ranks(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Return all ranks that belong to the given replicas."""
        if self.count == len(self.of_rank):
            return tuple(replicas)
        return tuple(rank for rank, replica in enumerate(self.of_rank) if replica in replicas)

    def needs(self, rank: int, saved: Sequence[int], gradients: bool) -> list[int]:
        """Return the ranks of the saved run whose checkpoint parts this rank needs to resume, besides rank 0's part.

        Args:
            rank: this rank.
            saved: the replica of each rank in the run that saved the checkpoint.
            gradients: True if the parts contain gradients.
        """
        if tuple(saved) == self.of_rank:
            return [rank]
        if gradients:  # other ranks take the mean over all replicas
            return list(range(len(saved)))
        mine = range(self.index, max(saved, default=-1) + 1, self.count)
        return sorted({0, *(list(saved).index(replica) for replica in mine)})

    def for_feed(self, members: comm.Group) -> Replicas:
        """Return the replicas among which data loaders divide samples.

        Args:
            members: process group of the ranks in this replica.
        """
        if self.count == len(self.of_rank):
            return Replicas(self.index, self.count)
        first = self.first_ranks
        return Replicas(
            self.index,
            self.count,
            gather=lambda tensor: comm.all_gather_tensor(tensor)[first],
            gather_members=lambda tensor: comm.all_gather_tensor(tensor, members),
        )


def column_group(replicas: ReplicaMap, timeout: timedelta) -> comm.Group:
    """Create a process group of this rank and its counterpart in each other replica. Collective.

    A reduction over the group counts each sample once.
    """
    if replicas.count == comm.world_size():
        everyone: comm.Group = dist.new_group(timeout=timeout)
        return everyone
    return group_among(replicas.columns, timeout)


def group_among(parts: Sequence[Sequence[int]], timeout: timedelta) -> comm.Group:
    """Create a process group for each list of ranks in ``parts``; return this rank's group. Collective."""
    made: list[comm.Group] = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts]
    return next(group for ranks, group in zip(parts, made, strict=True) if comm.rank() in ranks)


@dataclass(frozen=True)
class _Sent:
    """Placeholder, in a pickled object, for a tensor that is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Same:
    """Placeholder, in a pickled object, for a tensor that the gathering rank already has."""

    number: int


def gather_on(to: int, obj: object, alike: bool = False) -> list[Any]:
    """Gather one object from each rank on rank ``to``, in the order of the ranks. Collective.

    Other ranks return an empty list.
    Tensors are sent one by one, so that the gathering rank needs little more memory than for the result.

    Args:
        to: the rank that gathers.
        obj: dicts, lists and tuples of tensors and picklable objects. Tensors of a device arrive on the CPU.
        alike: do not send tensors that the gathering rank already has with the same bits. The result then contains that
            rank's own tensors, each at most once per sender, and the caller must not change it.
    """
    if comm.world_size() == 1:
        return [obj]
    device = comm.carrier(None, torch.device("cpu"))
    obj = tree_map(on_host, obj, Tensor)
    known = _KnownTensors(to, list(filter(_goes_alone, tree_leaves(obj, Tensor)))) if alike else None
    if comm.rank() != to:
        tensors: list[Tensor] = []

        def replaced(tensor: Tensor) -> Tensor | _Sent | _Same:
            if not _goes_alone(tensor):
                return tensor
            number = None if known is None else known.number_of(tensor)
            if number is not None:
                return _Same(number)
            tensors.append(tensor)
            return _Sent(tuple(tensor.shape), tensor.dtype)

        dist.gather_object(packed(tree_map(replaced, obj, Tensor)), None, to)
        for tensor in tensors:
            if tensor.numel():
                dist.send(comm.as_bytes(tensor).to(device), to)
        return []
    objects: list[Any] = [None] * comm.world_size()
    dist.gather_object(None, objects, to)

    def fetch(sent: _Sent | _Same, source: int) -> Tensor:
        if isinstance(sent, _Same):
            assert known is not None
            return known.tensors[sent.number]
        tensor = torch.empty(sent.shape, dtype=sent.dtype)
        if tensor.numel():
            raw = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
            dist.recv(raw, source)
            tensor.copy_(raw.cpu().view(sent.dtype).view(sent.shape))
        return tensor

    kinds = (_Sent, _Same)
    return [
        obj if r == to else tree_map(partial(fetch, source=r), unpacked(each), kinds) for r, each in enumerate(objects)
    ]


def gather_on_zero(obj: object, alike: bool = False) -> list[Any]:
    """Gather one object from each rank on rank 0; see `gather_on`."""
    return gather_on(0, obj, alike)


def _goes_alone(tensor: Tensor) -> bool:
    """Return True if a tensor can be rebuilt from its bytes, shape and dtype alone."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg())


class _KnownTensors:
    """Lookup table of one rank's tensors by hash. Each rank has a copy of the table. The constructor is collective.

    Args:
        rank: the rank whose tensors are indexed.
        tensors: tensors of this rank.

    Attributes:
        tensors: tensors of this rank.
    """

    def __init__(self, rank: int, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        found = [_digest(tensor) for tensor in tensors] if comm.rank() == rank else []
        self._numbers: dict[bytes, list[int]] = {}
        for number, digest in reversed(list(enumerate(comm.broadcast_object(found, rank)))):
            self._numbers.setdefault(digest, []).append(number)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the index of an unused entry equal to ``tensor``, and mark it as used; None without such an entry."""
        numbers = self._numbers.get(_digest(tensor))
        return numbers.pop() if numbers else None


def _digest(tensor: Tensor) -> bytes:
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    found.update(comm.as_bytes(tensor).numpy().data)
    return found.digest()


class Collectives:
    """Collectives for loops and user code. With one process, they return without communication.

    Attributes:
        world: rank and world size of this process.
        device: device of this rank's tensors.
        absent: ranks without samples for the current micro-batch; set while the other ranks run user code without them.
    """

    def __init__(self) -> None:
        # not the default group's: the process may be in a group that is not the run's, such as that of a test's ranks
        self.world = World.single()
        self.device = torch.device("cpu")
        self.absent: tuple[int, ...] = ()

    def check_present(self, call: str, group: comm.Group = None) -> None:
        """Raise if user code calls a collective that ranks without samples cannot join.

        Args:
            call: the call, for the message.
            group: the ranks of the collective; None: all.

        Raises:
            MisconfigurationException: the collective would wait for a rank that does not run this code.
        """
        missing = [rank for rank in self.absent if group is None or rank in comm.ranks_of(group)]
        if missing:
            which = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing} have"
            raise MisconfigurationException(
                f"{call} was called for a micro-batch for which {which} no samples (the data set does not divide "
                "evenly), so the other ranks would wait forever. Call it in a hook that every rank runs "
                "(`on_before_optimizer_step`, `on_train_epoch_end`), drop the last batch (DataLoader(drop_last=True)), "
                "or reduce the value with `self.log(..., sync_dist=True)`."
            )

    @contextmanager
    def with_all_ranks(self) -> Iterator[None]:
        """Allow collectives inside a block that all ranks run, including ranks without samples."""
        before, self.absent = self.absent, ()
        try:
            yield
        finally:
            self.absent = before

    def make_agreement(self) -> ConsensusFlags:
        """Create flags that all ranks share: in shared memory on one host, by asynchronous messages across hosts."""
        return ConsensusFlags(alone=self.world.size == 1)

    @does("strategy.barrier")
    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`."""
        if self.world.size > 1:
            self.check_present("strategy.barrier()")
            comm.barrier()

    @does("strategy.broadcast")
    def broadcast(self, obj: object, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank."""
        if self.world.size == 1:
            return obj
        self.check_present("strategy.broadcast(...)")
        return comm.broadcast_object(obj, src)

    @does("all_gather")
    def all_gather(self, tensor: Tensor, group: comm.Group = None, sync_grads: bool = False) -> Tensor:
        """Return the stacked tensors of all ranks: ``(world_size, *shape)``; on one process the tensor itself."""
        if self.world.size == 1:
            return tensor
        self.check_present("all_gather(...)", group)
        return (comm.all_gather_with_grad if sync_grads else comm.all_gather_tensor)(tensor, group)

    @does("strategy.reduce")
    def reduce(self, tensor: Tensor | float, group: comm.Group = None, reduce_op: object = "mean") -> Any:
        """Return the tensor reduced over all ranks, as a new tensor; on one process, return the argument itself.

        Args:
            tensor: a tensor of the same shape and dtype on all ranks.
            group: process group to reduce over; None means all ranks.
            reduce_op: "mean" or "avg", "sum", "min", "max", or the ``ReduceOp`` of that name; None is the sum.
        """
        if self.world.size == 1:
            return tensor
        self.check_present(f"strategy.reduce(..., reduce_op={reduce_op!r})", group)
        value = tensor if isinstance(tensor, Tensor) else torch.full((), tensor, device=self.device)
        name = str(reduce_op).rpartition(".")[2].lower()
        operation: Any = {"avg": "mean", "none": "sum"}.get(name, name)
        return comm.all_reduce(value, operation, group)  # which refuses others

    def decide(self, decision: bool, all: bool = True) -> bool:
        """Return True if ``decision`` is True on all ranks; with ``all=False``, if it is True on any rank."""
        if self.world.size == 1:
            return bool(decision)
        self.check_present("strategy.reduce_boolean_decision(...)")
        return bool(comm.all_reduce(self._sent(torch.tensor(int(decision))), "min" if all else "max"))

    def gather_stacked(self, vector: Tensor) -> Tensor:
        """Gather CPU vectors of equal length from all ranks into one tensor of shape ``(world_size, n)``."""
        return vector.unsqueeze(0) if self.world.size == 1 else comm.all_gather_tensor(self._sent(vector)).cpu()

    def combined(self, vector: Tensor, combine: comm.Combine) -> Tensor:
        """Combine CPU vectors of equal length from all ranks along a tree of fixed shape; see `comm.combined`."""
        return comm.combined(self._sent(vector), combine) if self.world.size > 1 else combine(vector.unsqueeze(0))

    def combined_there(self, row: Tensor, combine: comm.Combine) -> Tensor:
        """Combine one tensor per rank as `combined` does, on this rank's device and without waiting for the device."""
        return comm.combined_there(row, combine)

    def _sent(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor as it is if a backend can send it, otherwise moved to this rank's device."""
        return tensor if comm.backend_of(None, "cpu") else tensor.to(self.device)

    def from_zero(self, obj: object, make: Callable[[list[Any]], Any]) -> Any:
        """Gather small picklable objects on rank 0, call ``make`` with the list of them, and broadcast its result.

        ``make`` runs only on rank 0 and must not raise.
        """
        if self.world.size == 1:
            return make([obj])
        found = comm.gather_objects(obj)
        return comm.broadcast_object(make(found) if self.world.is_zero else None)

    def gather_on_zero(self, obj: object, alike: bool = False) -> list[Any]:
        """Gather one object from each rank on rank 0; other ranks return an empty list. See `gather_on`."""
        return [obj] if self.world.size == 1 else gather_on_zero(obj, alike)

    def gather_on_callers(self, obj: object) -> list[Any]:
        """Gather one object from each rank on the first rank of each node, which sends results to the calling process.

        Collective; see `gather_on`.
        """
        if self.world.size == 1:
            return [obj]
        first = self.gather_stacked(torch.tensor([self.world.local_rank], dtype=torch.float64)).flatten().tolist()
        found = [gather_on(rank, obj) for rank, local_rank in enumerate(first) if local_rank == 0]
        return next(filter(None, found), [])

    def gather_objects(self, obj: object) -> list[Any]:
        """Gather a small picklable object from each rank into a list, in the order of the ranks."""
        return [obj] if self.world.size == 1 else comm.all_gather_object(obj)
