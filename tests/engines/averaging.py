"""A strategy as small as one can be: ranks average their gradients, one by one, after the backward of a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import LightningModule
from lockstep.engines.ranks import RankedStrategy


class AveragingStrategy(RankedStrategy):
    """Data parallel by one all-reduce for each parameter. Where no rank has a gradient, none is made."""

    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        super().setup_module(module, own_backward)
        for tensor in [*module.parameters(), *module.buffers()] if self.world.size > 1 else []:
            dist.broadcast(tensor.detach(), 0)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        held = [parameter.grad for parameter in self._parameters()] if self.drops_gradients else []
        super().backward(loss, *args, **kwargs)
        for parameter, gradient in zip(self._parameters(), held, strict=False):
            parameter.grad = gradient
        if self.sync_gradients:
            self._average()

    def skip(self, absent: bool = False) -> None:
        if self.sync_gradients:
            self._average()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.named_parameters().values() if parameter.requires_grad]

    def _average(self) -> None:
        if self.world.size == 1:
            return
        parameters = self._parameters()
        there = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        dist.all_reduce(there, dist.ReduceOp.MAX)
        for parameter, somewhere in zip(parameters, there.tolist(), strict=True):
            if somewhere:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(own)
                parameter.grad = own / self.world.size
        self.rounds += 1
