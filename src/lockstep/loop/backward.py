"""Backward of the losses of a fit, with the loss scale and the hooks around it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from lockstep.loop.micro_batches import MicroBatches
from lockstep.loop.optimizers import refuse_loss
from lockstep.loop.session import Session
from lockstep.loop.update import Update

NO_HOOK = (
    "rank {rank}: `training_step` returned None for the last micro-batch of a window, so that `on_after_backward` does "
    "not run here. If it changes gradients, and other ranks had a loss, the ranks' weights part: return `0.0 * loss`."
)


class Backward:
    """Runs the backwards of a fit."""

    def __init__(self, session: Session, update: Update, batches: MicroBatches) -> None:
        self._session = session
        self._strategy = session.strategy
        self._hooks = session.hooks
        self._scaler = session.strategy.precision.scaler
        self._shared = session.world_size > 1
        self._update = update
        self._batches = batches
        self._watch_loss = session.fit.finite.noting

    def of(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        """Backward of a loss times its factor; gives the product."""
        if isinstance(factor, Tensor) or factor != 1.0:  # of a device's nobody asks
            loss = loss * factor
        hooks = self._hooks
        try:
            if self._scaler is None and hooks.on_before_backward is None and hooks.on_after_backward is None:
                self._strategy.backward(loss)
            else:
                self._with_hooks(loss)
        except RuntimeError as error:
            refuse_loss(loss, "`training_step` returned", error)
            raise
        return loss

    def by_hand(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """``manual_backward``: batches count by their samples here too."""
        if self._watch_loss is not None and not self._session.is_padding:
            self._watch_loss(loss)
        if self._update.share != 1.0:
            loss = loss * self._update.share
        try:
            self._with_hooks(loss, *args, **kwargs)
        except RuntimeError as error:
            refuse_loss(loss, "manual_backward() was given", error)
            raise

    def skip(self) -> None:
        """Take part in the reduction without a loss: ``training_step`` returned None."""
        strategy = self._strategy
        strategy.skip_loss()
        if self._shared and strategy.sync_gradients and self._hooks.on_after_backward is not None:
            warnings.warn(NO_HOOK.format(rank=strategy.global_rank), stacklevel=3)  # on this rank, whichever it is

    def of_padding(self, loss: Tensor | None) -> None:
        """Backward of a padding batch, whose gradients count for nothing; the hook that follows is the caller's."""
        if loss is None:
            self._strategy.skip_loss()
        else:
            self._strategy.backward(loss if self._scaler is None else self._scaler.scale(loss))

    def _with_hooks(self, loss: Tensor, *args: object, **kwargs: Any) -> None:
        hooks, strategy, update = self._hooks, self._strategy, self._update
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if hooks.on_before_backward is not None and not self._session.is_padding:
            strategy.steps_end()
            if self._batches.absent:
                with self._batches.without_absent():
                    hooks.call("on_before_backward", loss)
            else:
                hooks.call("on_before_backward", loss)
        if self._scaler is not None and update.optimizer is None:
            update.watch.enlarge()
            strategy.backward(loss, *args, **kwargs)
            update.watch.reduce()
        else:
            strategy.backward(loss, *args, **kwargs)
        if hooks.on_after_backward is not None:
            hooks.call("on_after_backward")
