"""A moving average of the weights, as a user's callback: it has tensors of its own, which a resume must bring back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep import Callback, LightningModule, Trainer


class MovingAverage(Callback):
    """Averages the weights after each step. At the end of a fit the module gets the average.

    Args:
        decay: the part of the old average in the new one.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self.step = 0

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        for name, parameter in pl_module.named_parameters():
            before = self.average.get(name, parameter).to(parameter.device)  # a checkpoint is read onto the CPU
            self.average[name] = torch.lerp(parameter, before, self.decay)

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.copy_(self.average.get(name, parameter))

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average, self.step = dict(state_dict["average"]), state_dict["step"]
