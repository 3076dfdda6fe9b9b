"""Sharded optimizers under a strategy: what clipping, gradients and checkpoints are when each rank has slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log
from lockstep.precision.base import Precision
from lockstep.strategies.base import Strategy

if TYPE_CHECKING:  # the engine is imported by runs that use it
    from lockstep.parallel.zero.reducer import ShardedReducer

START = "DDPStrategy(shard_optimizer=True)"
PATIENCE = timedelta(seconds=10)
"""How long the end of a run waits for parameters of the last step, which others may never send."""


def check_options(views: bool, hook: Any, check_reduction: bool = False) -> None:
    """Refuse arguments of the strategy that do not go together with slices.

    Args:
        views: ``gradient_as_bucket_view``.
        hook: the communication hook.
        check_reduction: the argument of this name.

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


def check_shardable(parameters: Iterable[Tensor], optimizers: list[Any], sparse: list[str]) -> None:
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


class Sharding(Strategy):
    """The base of strategies whose optimizers may be sharded; without `shard`, nothing differs."""

    def __init__(self) -> None:
        super().__init__()
        self._sharded: _Sharded | None = None

    def shard(self, named_parameters: Iterable[tuple[str, Any]], **options: Any) -> ShardedReducer:
        """Let the optimizers of the run step on slices. A collective.

        Args:
            named_parameters: those that are reduced.
            **options: of the reducer.

        Returns:
            the reducer for the strategy's backwards.
        """
        options["named_parameters"] = named_parameters
        self._sharded = _Sharded(self.module, self.optimizers, self.precision, options)
        return self._sharded.reducer

    def teardown(self) -> None:
        """Give sharded parameters memory of their own; the optimizers can still be saved, all ranks together."""
        super().teardown()
        if self._sharded is not None:
            self._sharded.detach()

    def end_training(self) -> None:
        """Wait for what is still on its way."""
        super().end_training()
        if self._sharded is not None:
            self._sharded.shards.wait()

    def clip(self, optimizer: Any, value: float, algorithm: str) -> None:
        """Clip the whole gradient of an optimizer's parameters, of which each rank may have its slices."""
        if self._sharded is None:
            super().clip(optimizer, value, algorithm)
        else:
            self._sharded.shards.clip(optimizer, value, algorithm)

    def gradients_of(self, optimizer: Any) -> list[Tensor]:
        """The gradients that this rank updates with."""
        return super().gradients_of(optimizer) if self._sharded is None else self._sharded.gradients_of(optimizer)

    @contextmanager
    def whole_gradients(self) -> Iterator[None]:
        """Inside, ``.grad`` is the whole gradient; what is done to it counts. Collective."""
        if self.absent:
            self.check_present("strategy.whole_gradients()")
        if self._sharded is None:
            yield
        else:
            with self._sharded.shards.whole_gradients():
                yield

    def held_gradients(self) -> dict[str, Any]:
        """Gradients of a window under way; those that were reduced are whole, and named beside."""
        if self._sharded is None:
            return super().held_gradients()
        reduced = self._sharded.shards.reduced_names()
        with self.whole_gradients():
            return {**super().held_gradients(), "reduced": reduced}

    def hold_gradients(self, saved: dict[str, Any]) -> None:
        """Put back what `held_gradients` gave."""
        super().hold_gradients(saved)
        if self._sharded is not None:
            parameters = self.named_parameters()
            for name in saved.get("reduced", ()):
                parameter = parameters[name]
                self._sharded.shards.hold(parameter, parameter.grad)

    def optimizer_states(self, alone: bool) -> list[dict[str, Any]] | None:
        """The ordinary states, on rank 0; the others take part. None for a rank alone, which has but a part."""
        if self._sharded is None:
            return super().optimizer_states(alone)
        if not alone:
            return [self._sharded.shards.state_dict(optimizer, only=0) for optimizer in self.optimizers]
        log.warning(
            "A checkpoint from one rank alone holds the weights and no optimizer states, of which every rank has a "
            "part (shard_optimizer=True): a fit can begin with these weights, and cannot go on from there."
        )
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_sharded": None}


class _Sharded:
    """The sharded optimizers of one fit."""

    def __init__(self, module: nn.Module, optimizers: list[Any], precision: Precision, options: dict[str, Any]) -> None:
        from lockstep.parallel.zero.reducer import ShardedReducer

        self.reducer = ShardedReducer(module, optimizers, **options)
        self.shards = self.reducer.shards
        self._scaler = precision.scaler
        if self._scaler is not None:
            self._scaler.unscale_gradients = self.shards.unscale

    def gradients_of(self, optimizer: Any) -> list[Tensor]:
        return self.shards.gradients_of(optimizer)

    def detach(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_gradients = None
        try:
            self.shards.detach(PATIENCE)
        except RuntimeError as error:
            log.warning(f"This rank's weights lack the others' part of the last step, which did not come: {error}")
