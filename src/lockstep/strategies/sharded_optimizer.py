"""Sharded optimizers under a strategy: what clipping, gradients and checkpoints are when each rank has slices."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log
from lockstep.precision.base import Precision

START = "DDPStrategy(shard_optimizer=True)"
PATIENCE = timedelta(seconds=10)
"""How long the end of a run waits for parameters of the last step, which others may never send."""


def check_options(views: bool, hook: object, check_reduction: bool = False, offload_optimizer: bool = False) -> None:
    """Refuse arguments of the strategy that do not go together with slices.

    Args:
        views: ``gradient_as_bucket_view``.
        hook: the communication hook.
        check_reduction, offload_optimizer: the arguments of these names.

    Raises:
        MisconfigurationException: with the argument and the way out.
    """
    if not views:
        raise MisconfigurationException(
            f"{START} with gradient_as_bucket_view=False: ranks exchange slices of the buckets, in which gradients "
            "lie; leave gradient_as_bucket_view at True."
        )
    if hook is not None:
        raise MisconfigurationException(
            f"{START} with ddp_comm_hook={getattr(hook, '__qualname__', hook)!r}: a communication hook reduces whole "
            "buckets, and here each rank reduces its slice: use one of them."
        )
    if check_reduction:
        raise MisconfigurationException(
            f"{START} with check_reduction=True: each rank has a slice of its own, and nothing is there to compare; "
            "leave check_reduction out."
        )
    if offload_optimizer:
        raise MisconfigurationException(
            f"{START} with offload_optimizer=True: each rank's slices of the states stay on its device: use one of "
            'them, or strategy="fsdp_cpu_offload".'
        )


def check_shardable(parameters: Iterable[Tensor], optimizers: list[Optimizer], sparse: list[str]) -> None:
    """Refuse what cannot be sliced, before anything is allocated.

    Args:
        parameters: those that are reduced.
        optimizers: of the run.
        sparse: names of parameters with sparse gradients.

    Raises:
        MisconfigurationException: with the parameter or the optimizer's class, and the way out.
    """
    from lockstep.parallel.zero.optimizers import check_elementwise, concerned

    if sparse:
        raise MisconfigurationException(
            f"{START}: the gradients of {', '.join(sparse)} are sparse, and cannot be sliced: build the layers with "
            "sparse=False, or leave shard_optimizer off."
        )
    try:
        check_elementwise(concerned(parameters, optimizers))
    except ValueError as error:
        raise MisconfigurationException(f"{START}: {error}.") from None


class ShardedUpdate:
    """The sharded optimizers of one fit, which step on slices. Making it is collective.

    Args:
        module, optimizers, precision: of the fit.
        **options: of `lockstep.parallel.zero.reducer.ShardedReducer`.

    Attributes:
        reducer: for the strategy's backwards.
        shards: the slices.
    """

    def __init__(self, module: nn.Module, optimizers: list[Optimizer], precision: Precision, **options: Any) -> None:
        from lockstep.parallel.zero.reducer import ShardedReducer

        self.reducer = ShardedReducer(module, optimizers, **options)
        self.shards = self.reducer.shards
        self._optimizers = optimizers
        self._scaler = precision.scaler
        if self._scaler is not None:
            self._scaler.unscale_gradients = self.shards.unscale

    def states(self, alone: bool) -> list[dict[str, Any] | None] | None:
        """The ordinary states, on rank 0; the others take part. None for a rank alone, which has but a part."""
        if not alone:
            return [self.shards.state_dict(optimizer, only=0) for optimizer in self._optimizers]
        log.warning(
            "A checkpoint from one rank alone holds the weights and no optimizer states, of which every rank has a "
            "part (shard_optimizer=True): a fit can begin with these weights, and cannot go on from there."
        )
        return None

    def detach(self) -> None:
        """Give sharded parameters memory of their own."""
        if self._scaler is not None:
            self._scaler.unscale_gradients = None
        try:
            self.shards.detach(PATIENCE)
        except RuntimeError as error:
            log.warning(f"This rank's weights lack the others' part of the last step, which did not come: {error}")
