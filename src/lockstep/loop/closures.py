"""The update of an optimizer that takes a closure, in which the last micro-batch of the window is played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.device_numbers import widest
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.micro_batches import Begun, MicroBatches
from lockstep.loop.session import Session
from lockstep.loop.step_output import StepOutputs
from lockstep.loop.update import Update


class ClosureUpdate:
    """Has ``optimizer.step`` play the last micro-batch of a window by a closure.

    Each further call of the closure drops the gradients and plays the whole window again; what is logged is what the
    last call saw.

    Args:
        session, batches, outputs, update: of the fit.
        play: forward and backward of one micro-batch; gives what ``on_train_batch_end`` is shown.

    Attributes:
        losses: of the window under way, as backward saw them.
    """

    def __init__(
        self,
        session: Session,
        batches: MicroBatches,
        outputs: StepOutputs,
        update: Update,
        play: Callable[[Begun], Any],
    ) -> None:
        self._strategy = session.strategy
        self._results = session.results
        self._progress = session.fit.progress
        self._shared = session.world_size > 1
        self._batches, self._outputs, self._update = batches, outputs, update
        self._play = play
        self.losses: list[Tensor] = []

    def step(self, window: list[Begun]) -> Any:
        """The update of a window whose last micro-batch is still to be played."""
        outputs: Any = {}
        logged: Any = None  # before the last micro-batch
        played = False

        @torch.enable_grad()  # an optimizer's step may run under no_grad
        def closure() -> Tensor | None:
            nonlocal outputs, logged, played
            if played:
                self._results.go_back(logged)
                self.losses.clear()
            else:
                logged = self._results.snapshot()
            for micro_batch in window if played else window[-1:]:
                outputs = self._play_again(micro_batch)
            played = True
            self._update.prepare()
            return self._loss(all(micro_batch.weight for micro_batch in window))

        optimizer: Any = self._update.wrapped[0]  # which stands for an Optimizer
        self._update.module.optimizer_step(self._progress.epoch, window[-1].number, optimizer, closure)
        if not played:
            raise MisconfigurationException(
                "`optimizer_step` did not run its `optimizer_closure`, in which forward and backward are: call "
                "`optimizer.step(closure=optimizer_closure)`, or `optimizer_closure()` alone to skip the update."
            )
        return outputs

    def _play_again(self, micro_batch: Begun) -> Any:
        self._strategy.sync_gradients = micro_batch.last
        self._batches.enter_step(muted=not micro_batch.last or micro_batch.weight == 0.0)
        self._batches.absent = micro_batch.absent
        return self._play(micro_batch)

    def _loss(self, has_samples: bool) -> Tensor | None:
        """What the closure returns: the loss of the window; None where no step returned one.

        Args:
            has_samples: whether this rank has samples of each micro-batch.
        """
        losses, needed = self.losses, self._update.needs_closure
        if not losses and not needed:
            return None
        if not losses and has_samples:
            raise MisconfigurationException(
                f"{type(self._update.optimizer).__name__} steers by the loss, and `training_step` returned None for "
                "every micro-batch of this window: return the loss."
            )
        if not losses:
            losses = [torch.zeros((), device=self._strategy.root_device)]  # the others' count
        total = torch.stack(losses).sum() * self._outputs.factor
        if not (needed and self._shared):
            return total
        # a line search steers by it, so it must be the same number on all ranks; one without samples does not know
        # its type
        mean: Tensor = self._strategy.reduce(total.to(widest(total.device)), reduce_op="mean")
        return mean
