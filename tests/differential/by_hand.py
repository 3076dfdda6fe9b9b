"""Manual optimization as users write it: optimizers past the wrapper, clipping by hand, SAM, accumulation by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.differential.play import Player


class ByHand:
    """One batch of a manual ``training_step``."""

    def __init__(self, player: Player, module: Any, batch: Any, batch_idx: int) -> None:
        self.player, self.module, self.batch, self.batch_idx = player, module, batch, batch_idx
        self.way = player.program.by_hand
        given = module.optimizers(use_pl_optimizer=self.way != "raw")
        self.optimizers = given if isinstance(given, list) else [given]
        if self.way == "kept":
            self.optimizers = list(module.own_optimizers)

    def play(self) -> None:
        several = len(self.optimizers) > 1
        for optimizer in self.optimizers:
            toggled = several and self.way not in ("raw", "kept", "toggled")
            self.module.toggle_optimizer(optimizer) if toggled else None
            self.step(optimizer)
            self.module.untoggle_optimizer(optimizer) if toggled else None
        self.schedule()

    def step(self, optimizer: Any) -> None:
        if self.way == "closure":
            optimizer.step(closure=lambda: self.closure(optimizer))
            return
        if self.way == "toggled":
            with optimizer.toggle_model(sync_grad=True):
                self.backward(self.loss())
                optimizer.step()
                optimizer.zero_grad()
            return
        if self.way == "accumulated":
            self.backward(self.loss() / 2)
            if self.batch_idx % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            return
        if self.way == "two backwards":
            self.backward(self.loss() * 0.5)
            self.backward(self.loss() * 0.5)
        elif self.way == "sam":
            self.sharpness_aware(optimizer)
        else:
            self.backward(self.loss())
        self.clip(optimizer)
        if self.way == "now and then" and self.batch_idx % 3 == 1:
            optimizer.zero_grad()
            return
        optimizer.optimizer.step() if self.way == "inner" else optimizer.step()
        optimizer.zero_grad()

    def loss(self) -> Tensor:
        found: Tensor = self.module.loss(self.batch)
        return found

    def backward(self, loss: Tensor) -> None:
        self.module.manual_backward(loss)

    def closure(self, optimizer: Any) -> Tensor:
        loss = self.loss()
        optimizer.zero_grad()
        self.backward(loss)
        return loss

    def clip(self, optimizer: Any) -> None:
        if self.way == "torch clip":
            torch.nn.utils.clip_grad_norm_([p for p in self.module.parameters() if p.grad is not None], 0.1)
        elif self.way == "value clip":
            self.module.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")
        elif self.player.program.seed % 3 == 0:
            self.module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def sharpness_aware(self, optimizer: Any) -> None:
        """The gradient at the top of the slope around the weights."""
        self.backward(self.loss())
        moved = [(p, p.grad * 0.05) for p in self.module.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, way in moved:
                parameter.add_(way)
        optimizer.zero_grad()
        self.backward(self.loss())
        with torch.no_grad():
            for parameter, way in moved:
                parameter.sub_(way)

    def schedule(self) -> None:
        if not (self.player.program.manual_steps and self.player.program.schedulers):
            return
        schedulers = self.module.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            loss = self.module.trainer.callback_metrics.get("loss")
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(float(loss) if loss is not None else 1.0) if plateau else scheduler.step()
