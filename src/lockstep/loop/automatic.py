"""A window of automatic optimization: forward and backward of each micro-batch, and the update behind the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data.window import Window
from lockstep.loop.backward import Backward
from lockstep.loop.micro_batches import Begun, MicroBatches
from lockstep.loop.padding import padding
from lockstep.loop.session import Session
from lockstep.loop.step_output import StepOutputs, with_loss
from lockstep.loop.update import Update


class Automatic:
    """Plays windows.

    The order of a window of two micro-batches, as users' hooks see it (Lightning's)::

        on_train_batch_start, training_step, on_before_zero_grad, zero_grad,
            on_before_backward, backward, on_after_backward, on_train_batch_end
        on_train_batch_start, training_step,
            on_before_backward, backward, on_after_backward,
            on_before_optimizer_step, clip, optimizer.step, schedulers, on_train_batch_end

    On a rank without samples run, of all this, zero_grad, on_after_backward where the gradients were reduced,
    on_before_optimizer_step, clipping and the step.
    """

    at_once = 1

    def __init__(
        self, session: Session, batches: MicroBatches, outputs: StepOutputs, update: Update, backward: Backward
    ) -> None:
        self._session = session
        self._strategy = session.strategy
        self._hooks = session.hooks
        self._scaler = session.strategy.precision.scaler
        self._shared = session.world_size > 1
        self._batches, self._outputs, self._update, self._backward = batches, outputs, update, backward
        self._learn_from: Callable[[Tensor, float | Tensor], Tensor] = backward.of
        self._watch_loss = session.fit.finite.noting

    def window(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Play one window, yielding after each micro-batch, when its hooks have run."""
        batches, update = self._batches, self._update
        steps = self._shared or bool(window.begun)  # whether there is a batch that is not None
        for micro_batch in batches.begun(window, batch_idx):
            steps = steps or micro_batch.batch is not None
            shown = self.play(micro_batch)
            if micro_batch.last:
                if steps:
                    update.prepare()
                    self._strategy.step(update.optimizer)  # type: ignore[arg-type]  # there is one on this way
                update.end_window(micro_batch.number, steps)
            batches.end(shown, micro_batch)
            yield

    def play(self, micro_batch: Begun) -> Any:
        """Forward and backward of one micro-batch; gives what ``on_train_batch_end`` is shown."""
        if micro_batch.absent:
            return self._play_with_absent(micro_batch)
        if micro_batch.batch is None:
            return self._without_batch(micro_batch)
        batches = self._batches
        if batches.takes_idx:
            output = self._strategy.run(batches.training_step, micro_batch.batch, micro_batch.number)
        else:
            output = self._strategy.run(batches.training_step, micro_batch.batch)
        return self._learn(output, micro_batch)

    def _learn(self, output: Any, micro_batch: Begun) -> Any:
        """Backward from what ``training_step`` returned."""
        loss, factor = self._outputs.read(output, micro_batch.share)
        if loss is not None and self._watch_loss is not None:
            self._watch_loss(loss)
        if micro_batch.first:
            self._update.zero_grad(micro_batch.number)
        if self._shared and self._strategy.sync_gradients:
            self._batches.publish()
        if loss is None:
            self._backward.skip()
        else:
            loss = self._learn_from(loss, factor)
        return None if self._hooks.on_train_batch_end is None else with_loss(output, loss)

    def _without_batch(self, micro_batch: Begun) -> None:
        """What :meth:`play` does where the loader gave None for a batch."""
        if micro_batch.first and not self._strategy.sync_gradients:  # the window goes on
            self._update.zero_grad(micro_batch.number)
        if self._shared and self._strategy.sync_gradients:
            self._batches.publish()
        self._strategy.skip_loss()

    # -- where some ranks have no samples ------------------------------------------------------------------

    def _play_with_absent(self, micro_batch: Begun) -> Any:
        """:meth:`play` of a micro-batch of which some ranks have no samples."""
        strategy, batches = self._strategy, self._batches
        with strategy.leaving_out(micro_batch.absent):
            if micro_batch.weight and micro_batch.batch is None:
                return self._without_batch(micro_batch)
            if micro_batch.weight:
                with batches.without_absent():  # until the step returns: the others do not run it
                    output = strategy.run(batches.training_step, *batches.arguments(micro_batch))
                return self._learn(output, micro_batch)
            if strategy.runs_padding:
                self._run_padding(micro_batch)
            else:
                self._take_part(micro_batch)
            if strategy.sync_gradients and self._hooks.on_after_backward is not None:
                self._hooks.call("on_after_backward")
        return None

    def _take_part(self, micro_batch: Begun) -> None:
        """Take part in the window's reduction without samples."""
        strategy = self._strategy
        self._before_backward(micro_batch)
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=strategy.root_device))  # it is made by its first loss
        strategy.skip(absent=True)

    def _run_padding(self, micro_batch: Begun) -> None:
        """Let this rank, which has no samples, go through the step with the others."""
        strategy, batches = self._strategy, self._batches
        with padding(self._session):
            output = strategy.run(batches.training_step, *batches.arguments(micro_batch))
            loss = self._outputs.read_padding(output)
            self._before_backward(micro_batch)
            self._backward.of_padding(loss)

    def _before_backward(self, micro_batch: Begun) -> None:
        if micro_batch.first:
            self._update.zero_grad(micro_batch.number)
        if self._strategy.sync_gradients:
            self._batches.publish()
