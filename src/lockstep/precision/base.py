"""The seam of numeric precision: what a step asks of it; and the loss scale that float16 needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.ground.device import widest
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.torch_support import SCALER, refuse_without


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

    MOST_LEFT_OUT = 100
    """Steps in a row that may be left out; by then the scale has fallen by 30 orders of magnitude."""

    asked_by = "precision='16-mixed'"
    """The Trainer's flag that it stands for, in messages."""

    def __init__(self, device_type: str = "cuda", **options: Any) -> None:
        refuse_without(SCALER, SCALER, "take precision='bf16-mixed'")
        self._grad_scaler = torch.amp.GradScaler(device_type, **options)
        # in place of GradScaler's own, for an engine whose ranks have different parts of the gradients
        self.unscale_gradients: Callable[[torch.amp.GradScaler, Optimizer], None] | None = None
        self.left_out = False  # whether the last step was
        self.steps = False  # inside `step`, where the optimizer steps by its leave
        self._left_out_in_a_row = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on."""
        return self._grad_scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale; note whether one is not finite.

        Does nothing the second time, until `update` or `forget`.
        """
        self.left_out = False
        optimizer = _plain(optimizer)
        gradients = (p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if any(gradients) and not self.knows(optimizer):
            with _scale_beside(self._grad_scaler, optimizer):
                if self.unscale_gradients is None:
                    self._grad_scaler.unscale_(optimizer)
                else:
                    self.unscale_gradients(self._grad_scaler, optimizer)

    unscale_ = unscale  # torch's name, which users of `trainer.scaler` may know

    def share_overflow(self, optimizer: Optimizer, largest: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Between :meth:`unscale` and :meth:`step`: let ranks with different gradients decide alike. Collective.

        Args:
            optimizer: whose gradients were unscaled on the ranks that have any.
            largest: of a number of each rank.
            device: of this rank.
        """
        found = self._found(optimizer)
        if not found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        for overflow in found.values():
            overflow.copy_(largest(overflow))

    def step(self, optimizer: Optimizer, **options: Any) -> Any:
        """``optimizer.step(**options)``, left out if a gradient is not finite. Waits for the device.

        Returns:
            what the optimizer returned; None where the step was left out.

        Raises:
            MisconfigurationException: the optimizer calls a closure more than once a step.
        """
        self.refuse(optimizer)
        if not self.knows(optimizer):
            self.unscale(optimizer)
        if self.leaves_out(optimizer):
            return None
        self.steps = True
        try:
            return optimizer.step(**options)
        finally:
            self.steps = False

    def refuse(self, *optimizers: Optimizer) -> None:
        """Refuse an optimizer with a line search.

        Raises:
            MisconfigurationException: with the way out.
        """
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise MisconfigurationException(
                "precision='16-mixed' with LBFGS: its line search compares losses, which a loss scale changes; use "
                "precision='bf16-mixed' or '32-true'"
            )

    def leaves_out(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer must not step, as a gradient is not finite. Waits for the device.

        Raises:
            MisconfigurationException: it has not been able to for very many steps.
        """
        self.left_out = any(bool(overflow) for overflow in self._found(optimizer).values())
        self._left_out_in_a_row = self._left_out_in_a_row + 1 if self.left_out else 0
        if self._left_out_in_a_row >= self.MOST_LEFT_OUT:
            raise MisconfigurationException(self._too_many())
        return self.left_out

    def _too_many(self) -> str:
        """Explain why the run ends after so many steps that were left out."""
        return (
            f"precision='16-mixed': the last {self.MOST_LEFT_OUT} steps were left out, since gradients were NaN or "
            f"infinite, with ever smaller loss scales (now {self.get_scale():.3g}). The loss itself or the weights "
            "are not finite: Trainer(detect_anomaly=True) names the operation; precision='bf16-mixed' has the "
            "range of float32."
        )

    def update(self, optimizer: Optimizer | None = None) -> None:
        """Adapt the scale to whether gradients overflowed since the last call.

        Args:
            optimizer: the one that has stepped, and what is known of others counts later; None: all.
        """
        states = self._grad_scaler._per_optimizer_states
        others = {key: states.pop(key) for key in [*states] if optimizer is not None and key != id(_plain(optimizer))}
        if any(known["found_inf_per_device"] for known in states.values()):
            self._grad_scaler.update()  # which makes new ones
        self._grad_scaler._per_optimizer_states.update(others)

    # -- gradients that are scaled only while a backward runs

    def multiply(self, gradients: Iterable[Tensor]) -> None:
        """Scale gradients, in place."""
        scale = self._grad_scaler._scale
        assert scale is not None  # the loss was scaled before
        multiply(gradients, scale)

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Take the scale out of gradients, in place."""
        scale = self._grad_scaler._scale
        assert scale is not None
        multiply(gradients, scale.to(widest(scale.device)).reciprocal().float())

    def look(self, optimizer: Optimizer) -> None:
        """Note whether a gradient, with no scale in it, is not finite."""
        self.forget(optimizer)
        grad_scaler = self._grad_scaler
        if grad_scaler._scale is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if not parameters:
                return
            self.scale(torch.zeros((), device=parameters[0].device))  # it is made by its first loss
        scale = grad_scaler._scale
        assert scale is not None
        grad_scaler._scale = torch.ones_like(scale)
        try:
            self.unscale(optimizer)
        finally:
            grad_scaler._scale = scale

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether it is known of the optimizer's gradients if they are finite."""
        return bool(self._found(optimizer))

    def forget(self, optimizer: Optimizer) -> None:
        """New gradients come, of which nothing is known."""
        self._grad_scaler._per_optimizer_states.pop(id(_plain(optimizer)), None)

    def _found(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        state = self._grad_scaler._per_optimizer_states[id(_plain(optimizer))]
        found: dict[torch.device, Tensor] = state["found_inf_per_device"]
        return found

    def get_scale(self) -> float:
        """The scale. Waits for the device."""
        return self._grad_scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history, as ``torch.amp.GradScaler`` writes them."""
        return self._grad_scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._grad_scaler.load_state_dict(state)


class _GradientCheck(torch.amp.GradScaler):
    """A ``GradScaler`` whose scale is one: it only finds out whether gradients are finite."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Search the gradients, of which a loss scale would be taken out here."""
        device = next(p.grad.device for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        one, none_found = torch.ones((), device=device), torch.zeros((), device=device)
        # torch's kernel multiplies by one, which changes no number; gradients in float16 are no mistake here
        found = self._unscale_grads_(optimizer, one, none_found, True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found


class UpdateGuard(LossScaler):
    """Leaves out updates whose gradient is not finite, as a loss scale does, without scaling anything.

    It waits for the device once a step.

    Args:
        device_type: of the gradients.
        asked_by: the Trainer's flag that it stands for, in messages.
        on_found: called on all ranks where an update is to be left out; it may raise.
    """

    def __init__(self, device_type: str, asked_by: str, on_found: Callable[[], None]) -> None:
        super().__init__(device_type)
        self.asked_by = asked_by
        self.all_left_out = 0  # updates of this fit
        self._on_found = on_found
        self._grad_scaler = _GradientCheck(device_type)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss as it is."""
        return loss

    def multiply(self, gradients: Iterable[Tensor]) -> None:
        """Leave gradients as they are."""

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Leave gradients as they are."""

    def look(self, optimizer: Optimizer) -> None:
        """Note whether a gradient is not finite."""
        self.forget(optimizer)
        self.unscale(optimizer)

    def leaves_out(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer must not step, as a gradient is not finite. Waits for the device."""
        left_out = super().leaves_out(optimizer)
        if left_out:
            self._on_found()
        self.all_left_out += left_out
        return left_out

    def _too_many(self) -> str:
        return (
            f"{self.asked_by}: the last {self.MOST_LEFT_OUT} updates were left out, since gradients were not finite. "
            "The model does not recover: resume from an earlier checkpoint, with other data or a lower learning rate."
        )

    def update(self, optimizer: Optimizer | None = None) -> None:
        """Forget what is known of the gradients that were stepped with."""
        if optimizer is None:
            self._grad_scaler._per_optimizer_states.clear()
        else:
            self.forget(optimizer)

    def get_scale(self) -> float:
        """Return one."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: it has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state of a loss scale."""


def multiply(gradients: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place; by a tensor, those of a device and type together."""
    if not isinstance(factor, Tensor):
        torch._foreach_mul_(list(gradients) or [torch.empty(0)], factor)  # torch refuses none
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        alike.setdefault((values.device, values.dtype), []).append(values)
    with torch.no_grad():
        for (device, _), tensors in alike.items():
            torch._foreach_mul_(tensors, factor.to(device))


def _plain(optimizer: Any) -> Any:
    """The optimizer in what ``self.optimizers()`` gives, which says that it is one itself."""
    return optimizer if issubclass(type(optimizer), Optimizer) else getattr(optimizer, "optimizer", optimizer)


@contextmanager
def _scale_beside(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Iterator[None]:
    """Inside, the scale is on the CPU where gradients are, which an engine may keep there.

    torch copies a device's scale to the CPU without waiting for it: gradients would be divided by what happens to be in
    that memory, and a number that is not finite would be forgotten when the copy comes.
    """
    scale = scaler._scale
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if scale is None or scale.device.type == "cpu" or all(gradient.device.type != "cpu" for gradient in gradients):
        yield
        return
    scaler._scale = scale.cpu()
    try:
        yield
    finally:
        scaler._scale = scale


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
