"""Copies of many tensors to other devices, small ones together, and the sum of gradients that come back, in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy

from lockstep.ground.comm import grouped
from lockstep.ground.transfer import has_pinned_memory

TOGETHER = 2**24
"""Bytes of small tensors that are copied together at most."""


def copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """``tensors`` on ``device``, small ones of a dtype by one copy for many."""
    found: dict[int, Tensor] = {}
    non_blocking = has_pinned_memory(device.type)  # the CPU would read what is not there yet
    for indices in grouped(tensors, TOGETHER):
        if len(indices) == 1:
            found[indices[0]] = tensors[indices[0]].to(device, non_blocking=non_blocking)
            continue
        flat = torch.cat([tensors[index].reshape(-1) for index in indices]).to(device, non_blocking=non_blocking)
        stretches = flat.split([tensors[index].numel() for index in indices])
        for index, stretch in zip(indices, stretches, strict=True):
            found[index] = stretch.view(tensors[index].shape)
    return [found[index] for index in range(len(tensors))]


class CopiesOfAll(torch.autograd.Function):
    """Copies of parameters on several devices; their gradients are added up in the order of the devices.

    Autograd has a thread for each GPU: copies one by one would return their gradients in an order of chance.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.root, ctx.count = parameters[0].device, len(parameters)
        # `.data`: what several share of memory is no view for autograd
        return tuple(copy.data for device in devices for copy in copied(parameters, device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = [None] * ctx.count
        for first in range(0, len(grads), ctx.count):
            there = [(i, grad) for i, grad in enumerate(grads[first : first + ctx.count]) if grad is not None]
            for (index, _), grad in zip(there, copied([grad for _, grad in there], ctx.root), strict=True):
                before = sums[index]
                sums[index] = grad if before is None else before + grad
        return None, *sums


def copies_of(module: nn.Module, devices: Sequence[torch.device]) -> list[dict[int, Tensor]]:
    """For each device, by the id of the module's tensor: parameters there, and a buffer of its own.

    On the device where the module is these are the parameters themselves. Gradients of copies arrive at them.

    Raises:
        ValueError: for a lazy module that has not seen a batch.
    """
    parameters, buffers = list(module.parameters()), list(module.buffers())
    if any(is_lazy(tensor) for tensor in chain(parameters, buffers)):  # each replica would begin with its own weights
        raise ValueError("DataParallel: the module is lazy and has seen no batch; run one through it first.")
    homes = {tensor.device for tensor in chain(parameters, buffers)}
    away = [device for device in devices if homes != {device}]
    trained = [p for p in parameters if p.requires_grad]
    rest = [p for p in parameters if not p.requires_grad]
    moved = _trained_copies(trained, away)
    with torch.no_grad():
        for tensors, device in zip(moved, away, strict=True):
            fixed = [*rest, *buffers]
            tensors.update(zip(map(id, fixed), copied(fixed, device), strict=True))
        found = iter(moved)
        return [next(found) if homes != {device} else _beside(parameters, buffers) for device in devices]


def _trained_copies(trained: Sequence[Parameter], devices: Sequence[torch.device]) -> list[dict[int, Tensor]]:
    """For each device, by the id of the parameter: copies whose gradients arrive at the parameters."""
    if not trained or not devices:
        return [{} for _ in devices]
    # The views are nodes of the first device's thread, made before all others: they come last there, so that a
    # parameter that is used several times gets its gradients in one order.
    copies = CopiesOfAll.apply(devices, *[p.view_as(p) for p in trained])
    starts = range(0, len(copies), len(trained))
    return [dict(zip(map(id, trained), copies[at : at + len(trained)], strict=True)) for at in starts]


def _beside(parameters: Sequence[Parameter], buffers: Sequence[Tensor]) -> dict[int, Tensor]:
    """On the device where the module is: the parameters themselves, and copies of the buffers."""
    return {**{id(p): p for p in parameters}, **{id(b): b.clone() for b in buffers}}
