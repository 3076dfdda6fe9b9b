"""Base class of precisions, and the loss scaler for float16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.ground.device import widest
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.torch_support import SCALER, refuse_without


class LossScaler:
    """Adaptive loss scale, which is halved when gradients overflow and doubled after many steps without an overflow.

    The calls in a window::

        scaler.scale(loss).backward()  # each micro-batch
        scaler.unscale(optimizer)      # gradients are unscaled from here on: hooks, clipping
        scaler.step(optimizer)         # skipped if a gradient overflowed
        scaler.update()                # once, after all optimizers that stepped

    Ranks that average their gradients skip the same steps without communication, because an overflow on one rank is in
    the sum over all.

    The arithmetic is that of torch's ``torch.amp.GradScaler`` (Micikevicius et al., "Mixed Precision Training",
    2018).

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        options: further arguments of ``GradScaler``, such as ``init_scale`` and ``growth_interval``.
    """

    MOST_SKIPPED = 100
    """Number of consecutive skipped steps after which the run ends; the scale is then 30 orders of magnitude lower."""

    asked_by = "precision='16-mixed'"
    """Trainer argument that enables this scaler, for messages."""

    def __init__(self, device_type: str = "cuda", **options: Any) -> None:
        refuse_without(SCALER, SCALER, "take precision='bf16-mixed'")
        self._grad_scaler = torch.amp.GradScaler(device_type, **options)
        # replaces GradScaler's own, for an engine whose ranks have different parts of the gradients
        self.unscale_gradients: Callable[[torch.amp.GradScaler, Optimizer], None] | None = None
        self.left_out = False  # True if the last step was skipped
        self.steps = False  # True inside `step`, where the optimizer steps with the scaler's permission
        self._skipped_in_a_row = 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for ``backward``."""
        return self._grad_scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, and record whether all are finite.

        Further calls before `update` or `forget` do nothing.
        """
        self.left_out = False
        optimizer = _plain(optimizer)
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        first = next(gradients, None)
        if first is None or self.is_checked(optimizer):
            return
        scaler, scale = self._grad_scaler, self._grad_scaler._scale
        # An engine may keep gradients on the CPU. torch copies a device's scale there without waiting for it: gradients
        # would be divided by whatever is in that memory, and the copy would overwrite a non-finite number.
        is_on_device = scale is not None and scale.device.type != "cpu"
        if is_on_device and any(each.device.type == "cpu" for each in (first, *gradients)):
            scaler._scale = scale.cpu()  # type: ignore[union-attr]  # not None
        try:
            if self.unscale_gradients is None:
                scaler.unscale_(optimizer)
            else:
                self.unscale_gradients(scaler, optimizer)
        finally:
            scaler._scale = scale

    unscale_ = unscale  # torch's name, for users of `trainer.scaler`

    def share_overflow(self, optimizer: Optimizer, largest: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Make ranks with different gradients skip the same steps. Call it between `unscale` and `step`. Collective.

        Args:
            optimizer: the optimizer; its gradients were unscaled on ranks that have any.
            largest: function that returns the maximum of a scalar tensor over the ranks.
            device: device of this rank.
        """
        found = self._found(optimizer)
        if not found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        for overflow in found.values():
            overflow.copy_(largest(overflow))

    def step(self, optimizer: Optimizer, **options: Any) -> Any:
        """Call ``optimizer.step(**options)`` if all gradients are finite. Waits for the device.

        Returns:
            The optimizer's result; None if the step was skipped.

        Raises:
            MisconfigurationException: the optimizer calls a closure more than once per step.
        """
        self.refuse(optimizer)
        if not self.is_checked(optimizer):
            self.unscale(optimizer)
        if self.must_skip(optimizer):
            return None
        self.steps = True
        try:
            return optimizer.step(**options)
        finally:
            self.steps = False

    def refuse(self, *optimizers: Optimizer) -> None:
        """Raise an error if an optimizer uses a line search, which does not work with a scaled loss.

        Raises:
            MisconfigurationException: an optimizer is LBFGS; names an alternative.
        """
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise MisconfigurationException(
                "precision='16-mixed' does not support LBFGS: its line search compares losses, which the loss scale "
                "changes. Use precision='bf16-mixed' or '32-true'"
            )

    def must_skip(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer must skip its step because a gradient is not finite. Waits for the device.

        Raises:
            MisconfigurationException: `MOST_SKIPPED` steps in a row were skipped.
        """
        self.left_out = any(bool(overflow) for overflow in self._found(optimizer).values())
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.left_out else 0
        if self._skipped_in_a_row >= self.MOST_SKIPPED:
            raise MisconfigurationException(self._too_many())
        return self.left_out

    def _too_many(self) -> str:
        """Return the message that ends a run after too many skipped steps."""
        return (
            f"precision='16-mixed': the last {self.MOST_SKIPPED} steps were skipped, because gradients were NaN or "
            f"infinite even with smaller loss scales (now {self.get_scale():.3g}). The loss itself or the weights "
            "are not finite. Find the operation with Trainer(detect_anomaly=True), or use precision='bf16-mixed', "
            "which has the range of float32."
        )

    def update(self, optimizer: Optimizer | None = None) -> None:
        """Lower the scale if gradients have overflowed since the last call. Otherwise count towards raising it.

        Args:
            optimizer: use only the records about this optimizer, and keep the others for a later call; None: use all.
        """
        states = self._grad_scaler._per_optimizer_states
        others = {key: states.pop(key) for key in [*states] if optimizer is not None and key != id(_plain(optimizer))}
        if any(state["found_inf_per_device"] for state in states.values()):
            self._grad_scaler.update()  # replaces all records
        self._grad_scaler._per_optimizer_states.update(others)

    # -- gradients that are scaled only while a backward runs

    def multiply(self, gradients: Iterable[Tensor]) -> None:
        """Multiply gradients by the scale, in place."""
        scale = self._grad_scaler._scale
        assert scale is not None  # the loss was scaled before
        multiply(gradients, scale)

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        scale = self._grad_scaler._scale
        assert scale is not None
        multiply(gradients, scale.to(widest(scale.device)).reciprocal().float())

    def check(self, optimizer: Optimizer) -> None:
        """Record whether the optimizer's unscaled gradients are finite."""
        self.forget(optimizer)
        grad_scaler = self._grad_scaler
        if grad_scaler._scale is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if not parameters:
                return
            self.scale(torch.zeros((), device=parameters[0].device))  # torch creates it at the first loss
        scale = grad_scaler._scale
        assert scale is not None
        # a scale of one: torch's search for non-finite values is a part of unscaling
        grad_scaler._scale = torch.ones_like(scale)
        try:
            self.unscale(optimizer)
        finally:
            grad_scaler._scale = scale

    def is_checked(self, optimizer: Optimizer) -> bool:
        """Return True if `check` or `unscale` has checked the optimizer's gradients."""
        return bool(self._found(optimizer))

    def forget(self, optimizer: Optimizer) -> None:
        """Discard the recorded check of the optimizer's gradients, before new gradients are computed."""
        self._grad_scaler._per_optimizer_states.pop(id(_plain(optimizer)), None)

    def _found(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        state = self._grad_scaler._per_optimizer_states[id(_plain(optimizer))]
        found: dict[torch.device, Tensor] = state["found_inf_per_device"]
        return found

    def get_scale(self) -> float:
        """Return the current scale. Waits for the device."""
        return self._grad_scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its history, in the format of ``torch.amp.GradScaler``."""
        return self._grad_scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and its history from the result of `state_dict`."""
        self._grad_scaler.load_state_dict(state)


class _GradientCheck(torch.amp.GradScaler):
    """``GradScaler`` with a scale of one, used only to search gradients for non-finite values."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Search the gradients for non-finite values, without dividing them."""
        device = next(p.grad.device for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        one, none_found = torch.ones((), device=device), torch.zeros((), device=device)
        # torch's kernel multiplies by one, which changes no number; float16 gradients are allowed here
        found = self._unscale_grads_(optimizer, one, none_found, True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found


class UpdateGuard(LossScaler):
    """Guard that skips updates with non-finite gradients. It is used like a scaler, but does not scale the loss.

    Each step waits for the device once.

    Args:
        device_type: type of the gradients' device.
        asked_by: Trainer argument that enables this scaler, for messages.
        on_found: called on all ranks before an update is skipped; it may raise.
    """

    def __init__(self, device_type: str, asked_by: str, on_found: Callable[[], None]) -> None:
        super().__init__(device_type)
        self.asked_by = asked_by
        self.all_left_out = 0  # number of skipped updates of this fit
        self._on_found = on_found
        self._grad_scaler = _GradientCheck(device_type)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged."""
        return loss

    def multiply(self, gradients: Iterable[Tensor]) -> None:
        """Do nothing, because gradients are not scaled."""

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Do nothing, because gradients are not scaled."""

    def check(self, optimizer: Optimizer) -> None:
        """Record whether the optimizer's gradients are finite."""
        self.forget(optimizer)
        self.unscale(optimizer)

    def must_skip(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer must skip its step because a gradient is not finite. Waits for the device."""
        left_out = super().must_skip(optimizer)
        if left_out:
            self._on_found()
        self.all_left_out += left_out
        return left_out

    def _too_many(self) -> str:
        return (
            f"{self.asked_by}: the last {self.MOST_SKIPPED} updates were skipped, because gradients were not "
            "finite. Resume from an earlier checkpoint, with different data or a lower learning rate."
        )

    def update(self, optimizer: Optimizer | None = None) -> None:
        """Discard the recorded gradient checks of ``optimizer``, or of all optimizers if it is None."""
        if optimizer is None:
            self._grad_scaler._per_optimizer_states.clear()
        else:
            self.forget(optimizer)

    def get_scale(self) -> float:
        """Return 1, because nothing is scaled."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict, because the scaler has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore a saved loss scale, because this scaler has no state."""


def multiply(gradients: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place, with one kernel per device and dtype if the factor is a tensor."""
    if not isinstance(factor, Tensor):
        torch._foreach_mul_(list(gradients) or [torch.empty(0)], factor)  # torch refuses an empty list
        return
    of_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        of_kind.setdefault((values.device, values.dtype), []).append(values)
    with torch.no_grad():
        for (device, _), tensors in of_kind.items():
            torch._foreach_mul_(tensors, factor.to(device))


def _plain(optimizer: Any) -> Any:
    """Return the torch optimizer inside a wrapper from ``self.optimizers()``."""
    return optimizer if issubclass(type(optimizer), Optimizer) else getattr(optimizer, "optimizer", optimizer)


class Precision:
    """Full precision (``32-true``), and base class of all other precisions.

    A loop calls, in this order:

    1. `convert_module`, once, before the optimizers are created, which keep references to parameters.
    2. for each batch ``convert_input(batch)``.
    3. around each ``*_step`` and its forward ``with context():``. Backward, clipping and the optimizer's step run
       outside.
    4. the methods of `scaler`, in the order of `LossScaler`.
    5. `state_dict` for a checkpoint, and `load_state_dict`.

    An attribute that is None means "nothing to do". A loop checks this once, at setup, not in each step.

    Args:
        device_type: type of the device, such as "cuda".
    """

    name: str = "32-true"
    """Name of the precision in ``Trainer(precision=...)``."""

    convert_input: Callable[[Any], Any] | None = None
    """Function that converts a batch to this precision."""

    context: Callable[[], AbstractContextManager[Any]] | None = None
    """Function that returns the context manager for a step method, such as ``torch.autocast``."""

    init_context: Callable[[], AbstractContextManager[Any]] | None = None
    """Function that returns the context manager for ``configure_model``, in which layers are created."""

    autocast_dtype: torch.dtype | None = None
    """Dtype in which linear layers and convolutions compute, if `context` is ``torch.autocast``."""

    scaler: LossScaler | None = None
    """Loss scaler, which prevents small float16 gradients from becoming zero."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert the module's parameters and buffers to this precision in place, and return the module."""
        return module

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state for a checkpoint; an empty dict without a scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state from the result of `state_dict`.

        Args:
            state: a state that `state_dict` returned; an empty dict is ignored.
        """
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
