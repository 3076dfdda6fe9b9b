"""How ranks that are processes of a group talk to each other: the part of a strategy that loops and users call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.agreement import ConsensusFlags
from lockstep.strategies.base import Strategy


class Collectives(Strategy):
    """The base of strategies with a process group."""

    def make_agreement(self) -> ConsensusFlags:
        """Shared flags: a word in shared memory on one host, an asynchronous message across hosts."""
        return ConsensusFlags()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.absent:
            self.check_present("strategy.barrier()")
        comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``, on every rank."""
        if self.absent:
            self.check_present("strategy.broadcast(...)")
        return comm.broadcast_object(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked: ``(world_size, *shape)``; on one process the tensor as it is."""
        if self.world.size == 1:
            return tensor
        if self.absent:
            self.check_present("all_gather(...)", group)
        return (comm.all_gather_with_grad if sync_grads else comm.all_gather_tensor)(tensor, group)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The tensor reduced over all ranks; the given one is not changed.

        Args:
            tensor: shapes and dtypes equal on all ranks.
            group: a process group in place of all ranks.
            reduce_op: "mean" or "avg", "sum", "min", "max", or the ``ReduceOp`` of that name; None is the sum.
        """
        if self.absent:
            self.check_present(f"strategy.reduce(..., reduce_op={reduce_op!r})", group)
        value = torch.as_tensor(tensor, device=self.root_device)
        name = str(reduce_op).rpartition(".")[2].lower()
        operation: Any = {"avg": "mean", "none": "sum"}.get(name, name)
        return comm.all_reduce(value, operation, group)  # which refuses others

    def gather_stacked(self, vector: Tensor) -> Tensor:
        """A CPU vector of equal length from all ranks: ``(world_size, n)``."""
        return comm.all_gather_tensor(vector.to(self.root_device)).cpu()

    def gather_objects(self, obj: Any) -> list[Any]:
        """A small picklable object from all ranks, by rank."""
        return comm.all_gather_object(obj)
