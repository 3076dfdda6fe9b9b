"""Optimizers with states divided among the ranks: each parameter has one owner, which alone updates it (ZeRO stage 1).

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
"""Factor over an even share from which the fullest rank causes a warning."""


class SteppingContainer(Protocol):
    """A container around a module whose optimizers can be divided, such as `lockstep.DistributedDataParallel`.

    Attributes:
        module: the module whose parameters it keeps the same on all ranks.
        process_group: the ranks.
        steps_together: True if a rank waits for the others in each step.
    """

    module: nn.Module
    process_group: Any
    steps_together: bool


class OwnedOptimizers(Owners):
    """Optimizers that update on each rank only its own parameters, with gradients that all ranks have.

    Frozen parameters get their owner with their first gradient.

    Args:
        optimizers: optimizers that update each parameter independently, over the same parameters on all ranks.
        group: the ranks.

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
                f"shard_optimizer=True: a rank keeps {fullest / whole:.0%} of the optimizer states "
                f"({1 / self._world:.0%} in an even division): parameters are not cut, and the largest are too large. "
                'strategy="fsdp" cuts parameters.'
            )

    @contextmanager
    def _updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Restrict the update in the block to this rank's parameters; then exchange the new values."""
        updated = self._with_gradient(optimizer)
        with without_gradients(filter(self._is_anothers, updated)):
            yield
        self._exchange(updated)

    @torch.no_grad()
    def _exchange(self, parameters: Sequence[Tensor]) -> None:
        """Broadcast each parameter from its owner, many in one message, with one message of each rank at a time."""
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
    """Wait for a message, and copy its values to the parameters."""
    work.wait()
    start = 0
    for parameter in parameters:
        values = flat[start : start + _count(parameter)]
        start += len(values)
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        real.copy_(values.view(real.shape))


def shard_optimizers(container: SteppingContainer, *optimizers: Optimizer) -> OwnedOptimizers:
    """Divide the states of ``optimizers`` among the ranks of a container, in a loop of your own.

    The loop does not change. All ranks must step together, and call ``optimizer.state_dict()`` together.

    Args:
        container: the container whose module's parameters they update.
        *optimizers: optimizers that update each parameter independently.

    Returns:
        The owners.

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
            f"shard_optimizers(): the gradients of {sorted(sparse)} are sparse: build the layers with sparse=False, or "
            "leave the optimizer's states on each rank"
        )
    container.steps_together = True
    return OwnedOptimizers(optimizers, container.process_group)
