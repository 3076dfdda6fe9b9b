"""The seam of numeric precision: what a step asks of it; and the loss scale that float16 needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.ground.errors import MisconfigurationException


class LossScaler:
    """A loss scale that adapts itself: halved when gradients overflow, doubled after a while without.

    In a window the calls come in this order::

        scaler.scale(loss).backward()  # each micro-batch
        scaler.unscale(optimizer)      # gradients are the true ones from here on: hooks, clipping
        scaler.step(optimizer)         # left out by itself if a gradient overflowed
        scaler.update()                # once, after all optimizers that stepped

    Ranks that average their gradients need no message to agree: an overflow on one is in the sum of all, so
    each of them skips the same steps.

    The arithmetic is torch's ``torch.amp.GradScaler`` (Micikevicius et al., "Mixed Precision Training",
    2018).

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        options: further arguments of ``GradScaler``, such as ``init_scale`` and ``growth_interval``.
    """

    def __init__(self, device_type: str = "cuda", **options: Any) -> None:
        self._grad_scaler = torch.amp.GradScaler(device_type, **options)
        self._checked = False
        # in place of GradScaler's own, for an engine whose ranks have different parts of the gradients
        self.unscale_gradients: Callable[[torch.amp.GradScaler, Optimizer], None] | None = None

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on."""
        return self._grad_scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale; note whether one is not finite."""
        if _has_gradients(optimizer):
            if self.unscale_gradients is None:
                self._grad_scaler.unscale_(optimizer)
            else:
                self.unscale_gradients(self._grad_scaler, optimizer)
            self._checked = True

    def share_overflow(self, optimizer: Optimizer, largest: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Between :meth:`unscale` and :meth:`step`: let ranks with different gradients decide alike. Collective.

        Args:
            optimizer: whose gradients were unscaled on the ranks that have any.
            largest: of a number of each rank.
            device: of this rank.
        """
        found = self._grad_scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        for overflow in found.values():
            overflow.copy_(largest(overflow))
        self._checked = True

    def step(self, optimizer: Optimizer) -> Any:
        """``optimizer.step()``, left out if a gradient is not finite.

        Returns:
            what the optimizer returned; None where the step was left out.

        Raises:
            MisconfigurationException: the optimizer calls a closure more than once a step.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(
                "precision='16-mixed' with LBFGS: its line search compares losses, which a loss scale "
                "changes; use precision='bf16-mixed' or '32-true'"
            )
        # torch's scaler asserts that it has seen gradients; a model that got none this time is no error
        return self._grad_scaler.step(optimizer) if _has_gradients(optimizer) else optimizer.step()

    def update(self) -> None:
        """Adapt the scale to whether gradients overflowed since the last call."""
        if self._checked:
            self._grad_scaler.update()
            self._checked = False

    def get_scale(self) -> float:
        """The scale. Waits for the device."""
        return self._grad_scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history, as ``torch.amp.GradScaler`` writes them."""
        return self._grad_scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._grad_scaler.load_state_dict(state)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


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

    init_context: Callable[[], AbstractContextManager[Any]] | None = None
    """Makes the context in which ``configure_model`` makes its layers."""

    autocast_dtype: torch.dtype | None = None
    """In which `context` lets linear layers and convolutions compute, where it is ``torch.autocast``."""

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
