"""Optimizers with states divided among the ranks: only a parameter's owner rank updates it (ZeRO stage 1).

Gradients are averaged and clipped as usual, and every rank has all of them. In ``step`` a rank updates its own
parameters, and broadcasts their new values before ``step`` returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engines.ddp.consistency import sparse_names
from lockstep.engines.owners import Owners, check_parameter_wise, without_gradients
from lockstep.engines.owners import parameter_wise as parameter_wise  # the path on earlier pages
from lockstep.ground import comm
from lockstep.ground.rank import warn_once

UNEVEN = 1.5
"""Ratio of the largest share of a rank to an even share, above which a warning is issued."""


class SteppingContainer(Protocol):
    """Interface of containers that `shard_optimizers` accepts, such as `lockstep.DistributedDataParallel`.

    Attributes:
        module: the module whose parameters the container keeps equal on all ranks.
        process_group: process group of the ranks.
        steps_together: True if each step waits for all ranks.
    """

    module: nn.Module
    process_group: Any
    steps_together: bool


class OwnedOptimizers(Owners):
    """Sharded optimizers: each rank has all gradients, but updates only the parameters that it owns.

    Frozen parameters are assigned an owner with their first gradient.

    Args:
        optimizers: optimizers that update each parameter independently, over the same parameters on all ranks.
        group: process group of the ranks.

    Raises:
        ValueError: an optimizer does not update parameters independently; see `check_parameter_wise`.
    """

    def __init__(self, optimizers: Iterable[Optimizer], group: comm.Group = None) -> None:
        super().__init__(optimizers, group)
        check_parameter_wise(self._every)
        if self._world == 1:
            return
        self._take_all()
        fullest, whole = max(self._load), sum(self._load)
        if fullest * self._world > UNEVEN * whole:
            warn_once(
                f"shard_optimizer=True: one rank stores {fullest / whole:.0%} of the optimizer states instead of "
                f"{1 / self._world:.0%}, because large parameters are not split. To split them, use "
                'strategy="fsdp".'
            )

    @contextmanager
    def _updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Hide parameters of other ranks from the optimizer inside the block. Then exchange the updated parameters."""
        updated = self._with_gradient(optimizer)
        with without_gradients(filter(self._is_remote, updated)):
            yield
        self._exchange(updated)

    @torch.no_grad()
    def _exchange(self, parameters: Sequence[Tensor]) -> None:
        """Broadcast parameters from their owners, many in one message. Each rank sends one message at a time."""
        members = comm.ranks_of(self._group)
        of_owner = [[p for p in parameters if self._owners[p] == owner] for owner in range(self._world)]
        under_way: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
        for row in zip_longest(*map(comm.pieces, of_owner)):
            for owner, piece in enumerate(row):
                if piece is None:
                    continue
                total = sum(map(_count, piece))
                device = comm.carrier(self._group, piece[0].device)
                mine = owner == self._rank
                flat = torch.cat([comm.numbers_of(p) for p in piece]).to(device) if mine else None
                dtype = piece[0].real.dtype if piece[0].is_complex() else piece[0].dtype
                flat = torch.empty(total, dtype=dtype, device=device) if flat is None else flat
                work = dist.broadcast(comm.as_bytes(flat), members[owner], group=self._group, async_op=True)
                under_way.append((work, flat, [] if mine else piece))
                if len(under_way) > self._world:
                    _arrive(*under_way.popleft())
        while under_way:
            _arrive(*under_way.popleft())


def _count(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _arrive(work: Any, flat: Tensor, parameters: Sequence[Tensor]) -> None:
    """Wait for a broadcast, and copy the received values from ``flat`` to the parameters."""
    work.wait()
    start = 0
    for parameter in parameters:
        values = flat[start : start + _count(parameter)]
        start += len(values)
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        real.copy_(values.view(real.shape))


def shard_optimizers(container: SteppingContainer, *optimizers: Optimizer) -> OwnedOptimizers:
    """Divide the states of ``optimizers`` among the ranks of a container, in a hand-written loop.

    The loop itself does not change. All ranks must step together, and call ``optimizer.state_dict()`` together.

    Args:
        container: the container around the module whose parameters the optimizers update.
        *optimizers: optimizers that update each parameter independently.

    Returns:
        The object that assigns an owner to each parameter.

    Raises:
        ValueError: an optimizer does not update parameters independently, or gradients are sparse.

    Example::

        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        shard_optimizers(model, optimizer)
        for batch, target in loader:
            optimizer.zero_grad()
            loss_fn(model(batch), target).backward()
            optimizer.step()
    """
    sparse = sparse_names(container.module)
    if sparse:
        raise ValueError(
            f"shard_optimizers() does not support the sparse gradients of {sorted(sparse)}. Build the layers with "
            "sparse=False, or do not shard the optimizer"
        )
    container.steps_together = True
    return OwnedOptimizers(optimizers, container.process_group)
