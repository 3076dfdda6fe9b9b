"""The seam of numeric precision: what a step asks of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lockstep.precision.scaler import LossScaler


class Precision:
    """Full precision, ``32-true``, and the base of the others: every question has the answer "nothing to do".

    The order of calls, each made by whoever runs the loop:

    1. `convert_module`, once, before the optimizers are made: they hold the parameters that it leaves.
    2. for each batch, where it is not None, ``convert_input(batch)``.
    3. around each ``*_step`` and the forward in it, where it is not None, ``with context():``. Backward,
       clipping and the optimizer's step run outside.
    4. where `scaler` is not None, the calls that `LossScaler` lists.
    5. `state_dict` into a checkpoint and `load_state_dict` out of it.

    None stands for "nothing" so that a loop can decide once, at setup, and pay nothing in a step.
    """

    name: str = "32-true"
    """As in ``Trainer(precision=...)``."""

    convert_input: Callable[[Any], Any] | None = None
    """Takes a batch, gives it back in this precision."""

    context: Callable[[], AbstractContextManager[Any]] | None = None
    """Makes the context of one step."""

    scaler: LossScaler | None = None
    """Keeps small gradients of 16-bit floats from vanishing."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with its parameters and buffers in this precision, changed in place."""
        return module

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: the scaler's state; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
