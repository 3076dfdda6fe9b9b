"""Accumulation windows whose last micro-batch runs inside ``optimizer.step(closure)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data.window import Window
from lockstep.ground.device import widest
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.session import Session
from lockstep.loop.step import Automatic, TrainingBatch
from lockstep.loop.update import Update


class ByClosure(Automatic):
    """Runner of accumulation windows whose last micro-batch runs in the closure that ``optimizer.step`` calls.

    Each further call of the closure drops the gradients and runs the whole window again. Only values logged in the
    last call count.
    """

    def __init__(self, session: Session, update: Update) -> None:
        super().__init__(session, update)
        self._losses: list[Tensor] = []  # of the current window, weighed

    def window(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Run one accumulation window. Yield after the hooks of each micro-batch."""
        played: list[TrainingBatch] = []
        steps = self.shared or bool(window.num_done)  # False if the loader gave None for every batch
        self._losses.clear()
        for micro_batch in self.micro_batches(window, batch_idx):
            steps = steps or micro_batch.batch is not None
            played.append(micro_batch)
            shown = self._step(played) if micro_batch.last and steps else self.forward_backward(micro_batch)
            if micro_batch.last:
                self.update.end_window(micro_batch.number, steps)
            self.end(shown, micro_batch)
            yield

    def backward(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        """Run backward, and store the loss for the closure's return value."""
        loss = super().backward(loss, factor)
        self._losses.append(loss.detach())
        return loss

    def _step(self, window: list[TrainingBatch]) -> Any:
        """Run the last micro-batch of a window inside the optimizer's step; return the micro-batch's outputs."""
        outputs: Any = {}
        logged: Any = None  # snapshot of the logged values before the last micro-batch
        played = False

        @torch.enable_grad()  # an optimizer's step may run under no_grad
        def closure() -> Tensor | None:
            nonlocal outputs, logged, played
            if played:
                self._results.go_back(logged)
                self._losses.clear()
            else:
                logged = self._results.snapshot()
            for micro_batch in window if played else window[-1:]:
                self._strategy.sync_gradients = micro_batch.last
                # earlier micro-batches were logged when they were played first
                self.enter_step(muted=not micro_batch.last or micro_batch.weight == 0.0)
                self.absent = micro_batch.absent
                outputs = self.forward_backward(micro_batch)
            played = True
            self.update.prepare()
            return self._loss(all(micro_batch.weight for micro_batch in window))

        optimizer: Any = self.update.wrapped[0]  # a wrapper, so that the user's `optimizer.step` runs the closure
        self.update.module.optimizer_step(self._progress.epoch, window[-1].number, optimizer, closure)
        if not played:
            raise MisconfigurationException(
                "The closure hasn't been executed: `optimizer_step` has to run its `optimizer_closure`, which runs "
                "forward and backward. Call `optimizer.step(closure=optimizer_closure)`, or `optimizer_closure()` "
                "alone to skip the update."
            )
        return outputs

    def _loss(self, has_samples: bool) -> Tensor | None:
        """Return the window's loss for the closure; None if all steps returned None and the optimizer needs no loss.

        Args:
            has_samples: True if this rank has samples of each micro-batch.
        """
        losses, needed = self._losses, self.update.needs_closure
        if not losses and not needed:
            return None
        if not losses and has_samples:
            raise MisconfigurationException(
                f"{type(self.update.optimizer).__name__} needs a loss, but `training_step` returned None for every "
                "micro-batch of this window: return the loss."
            )
        if not losses:
            losses = [torch.zeros((), device=self._strategy.root_device)]  # only those of other ranks count
        total = torch.stack(losses).sum() * self.update.factor
        if not (needed and self.shared):
            return total
        # a line search depends on it, so it must be the same number on all ranks; a rank without samples does not know
        # its dtype
        mean: Tensor = self._strategy.reduce(total.to(widest(total.device)), reduce_op="mean")
        return mean
