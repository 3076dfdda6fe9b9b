"""Gradients that DeepSpeed's engine has reduced and cut, in its own buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lockstep.engines.gradients import Gradients
from lockstep.extensions.deepspeed.engine import ZeroEngine
from lockstep.ground.errors import MisconfigurationException

MIDDLE = (
    "DeepSpeedStrategy: a checkpoint within an accumulation window cannot be saved: it does not contain the gradients "
    "of the window's first micro-batches. Save at the end of a window: make `val_check_interval` and "
    "`every_n_train_steps` multiples of accumulate_grad_batches."
)


class ZeroGradients(Gradients[ZeroEngine]):
    """Gradients in DeepSpeed's engine; ``.grad`` is empty."""

    def local(self, stepped: bool = False) -> list[Tensor]:
        """Return this rank's shards, and their norms as recorded by offload."""
        return [*self.holder.gradients(), *self.holder.norms()]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Fill ``.grad`` with whole gradients inside. Changes to them are lost. Collective."""
        zero = self.holder
        if not zero.has_gradients:
            yield
            return
        for parameter in zero.parameters.values():
            gradient = zero.whole_gradient(parameter)
            if gradient is not None and gradient.shape == parameter.shape:
                parameter.grad = gradient
        try:
            yield
        finally:
            for parameter in zero.parameters.values():
                parameter.grad = None

    def held(self) -> dict[str, Any]:
        """Raise: a checkpoint cannot hold the gradients of an unfinished window."""
        raise MisconfigurationException(MIDDLE)
