"""Gradients that DeepSpeed's engine has reduced and cut, in its own buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lockstep.engines.engine import Gradients
from lockstep.extensions.deepspeed.engine import ZeroEngine
from lockstep.ground.errors import MisconfigurationException

MIDDLE = (
    "DeepSpeedStrategy: a checkpoint within an accumulation window: DeepSpeed holds the gradients of its first "
    "micro-batches in parts that no checkpoint has. Save at the end of a window: let `val_check_interval` and "
    "`every_n_train_steps` be multiples of accumulate_grad_batches."
)


class ZeroGradients(Gradients[ZeroEngine]):
    """Of DeepSpeed's engine; ``.grad`` is empty."""

    def local(self, stepped: bool = False) -> list[Tensor]:
        """This rank's parts, and the norms that offloading has noted of them."""
        return [*self.holder.gradients(), *self.holder.norms()]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, ``.grad`` is the whole gradient, to be looked at: what is done to it is lost. Collective."""
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

    def window_state(self) -> dict[str, Any]:
        """Refuse it within a window."""
        raise MisconfigurationException(MIDDLE)
