"""Local SGD with an outer optimizer (DiLoCo: Douillard and others, 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.parallel.averaging import average
from lockstep.parallel.hooks.compress import Bytes, Code, Halves

_CODES: dict[str | None, Code | None] = {
    None: None,
    "fp16": Halves(torch.float16),
    "bf16": Halves(torch.bfloat16),
    "int8": Bytes(),
}


class OuterOptimizer:
    """Every ``period`` local steps, one outer step on the mean of what the ranks have done.

    The outer gradient is the difference between the parameters that all ranks began with and the mean of those that
    they have now. The outer optimizer steps from the former, and every rank goes on from where it arrives: with the
    same bits on all ranks. With ``lr=1, momentum=0`` that is plain averaging.

    Gradients must stay local meanwhile: `lockstep.parallel.hooks.post_local_sgd` with
    ``PostLocalSGDState(start, local_allreduce=False)`` keeps them so (or within a node, without that argument), or no
    reducer at all. Inner optimizers keep their states.

    It takes the memory of the parameters twice: where the ranks began, and the momentum; in float32 for 16-bit
    parameters.

    Args:
        parameters: the same on every rank, in the same order, and of the same values when local steps begin. All are
            stepped, frozen ones without effect.
        period: local steps in an outer one; DiLoCo's is 500.
        start: steps before the first local one, in which gradients are averaged over all ranks.
        lr, momentum, nesterov: of the outer SGD; DiLoCo's are the default.
        optimizer: a function from parameters to another outer optimizer.
        compression: how differences travel: as they are (None), or by "fp16", "bf16" (half the bytes of float32) or
            "int8" (a quarter), summed in float32.
        group: the ranks; ``None`` is the default group.
        buffers: tensors to be averaged with each outer step: a BatchNorm's running statistics. Whole numbers among
            them are left alone.

    Attributes:
        optimizer: the outer optimizer; None before the first local step. Its learning rate may be scheduled.
        steps: inner steps so far.
        agreed: whether all ranks' parameters are the same now.
        collectives: messages so far.
        bytes: bytes that this rank handed to them.

    Raises:
        MisconfigurationException: for a period below 1, a negative start, or another compression.

    Example::

        model = DistributedDataParallel(net)
        model.register_comm_hook(PostLocalSGDState(0, local_allreduce=False), post_local_sgd)
        outer = OuterOptimizer(model.parameters(), period=100)
        for batch in loader:
            inner.zero_grad()
            loss(model, batch).backward()
            inner.step()
            outer.step()
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        period: int,
        start: int = 0,
        group: comm.Group = None,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None = None,
        compression: Literal["fp16", "bf16", "int8"] | None = None,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        whole = isinstance(period, int) and isinstance(start, int) and not isinstance(period, bool)
        if not whole or period < 1 or start < 0:
            raise MisconfigurationException(
                f"OuterOptimizer(period={period!r}, start={start!r}): period is a number of steps above 0, and start "
                "one of at least 0"
            )
        if compression not in _CODES:
            raise MisconfigurationException(
                f'OuterOptimizer(compression={compression!r}): choose "fp16", "bf16", "int8", or None for none'
            )
        self.period = period
        self.start = start
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self.collectives = 0
        self.bytes = 0
        self._parameters = list(parameters)
        self._buffers = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        self._group = group
        self._code = _CODES[compression]
        self._make = optimizer or (lambda begun: _sgd(begun, lr, momentum, nesterov))
        self._begun: list[Parameter] = []
        if start == 0:
            self._begin()

    @property
    def agreed(self) -> bool:
        """Whether all ranks' parameters are the same now."""
        return self.steps <= self.start or (self.steps - self.start) % self.period == 0

    def step(self) -> bool:
        """After an inner optimizer's step: count it, and take an outer step if it is time. Collective then.

        Returns:
            Whether an outer step was taken.
        """
        self.steps += 1
        if self.steps < self.start:
            return False
        if self.steps == self.start:
            self._begin()
            return False
        if (self.steps - self.start) % self.period:
            return False
        self._outer_step()
        return True

    @torch.no_grad()
    def _begin(self) -> None:
        """Remember where all ranks are."""
        self._begun = [Parameter(parameter.detach().to(_wide(parameter), copy=True)) for parameter in self._parameters]
        self.optimizer = self._make(self._begun)

    @torch.no_grad()
    def _outer_step(self) -> None:
        assert self.optimizer is not None
        for begun, parameter in zip(self._begun, self._parameters, strict=True):
            begun.grad = begun.detach() - parameter.detach()
        gradients = [begun.grad for begun in self._begun if begun.grad is not None]
        for tensors, code in ((gradients, self._code), (self._buffers, None)):
            collectives, sent = average(tensors, self._group, code)
            self.collectives += collectives
            self.bytes += sent
        self.optimizer.step()
        for begun, parameter in zip(self._begun, self._parameters, strict=True):
            begun.grad = None
            parameter.detach().copy_(begun)

    @torch.no_grad()
    def take_in(self, parameters: Iterable[Tensor]) -> None:
        """Step these, too, from now on; the same on every rank, in the same order and of the same values."""
        known = {id(parameter) for parameter in self._parameters}
        late = [parameter for parameter in parameters if id(parameter) not in known]
        self._parameters += late
        if late and self.optimizer is not None:
            begun = [Parameter(parameter.detach().to(_wide(parameter), copy=True)) for parameter in late]
            self._begun += begun
            self.optimizer.add_param_group({"params": begun})

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks began, the outer optimizer's state, the count: plain, and alike on all ranks."""
        return {
            "steps": self.steps,
            "begun": [parameter.detach().clone() for parameter in self._begun],
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        if state["optimizer"] is None:
            self._begun, self.optimizer = [], None
            return
        if len(state["begun"]) != len(self._parameters):
            raise ValueError(
                f"the outer optimizer's state is of {len(state['begun'])} parameters, and there are "
                f"{len(self._parameters)}: it belongs to another model"
            )
        self._begin()
        assert self.optimizer is not None
        for begun, saved in zip(self._begun, state["begun"], strict=True):
            begun.detach().copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])


def _sgd(parameters: list[Parameter], lr: float, momentum: float, nesterov: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.element_size() == 2 and tensor.is_floating_point() else tensor.dtype
