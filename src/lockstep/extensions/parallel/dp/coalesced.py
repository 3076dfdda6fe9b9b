"""Copies of a module's tensors on other devices, made in few transfers. Gradients are summed in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.ground.comm import grouped
from lockstep.ground.transfer import has_pinned_memory

TOGETHER = 2**24
"""Largest size of a group of small tensors that are copied together, in bytes."""


def copy_tensors(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies of ``tensors`` on ``device``. Small tensors of one dtype share a transfer."""
    found: dict[int, Tensor] = {}
    # not to the CPU: it would read memory before the copy has arrived
    non_blocking = has_pinned_memory(device.type)
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
    """Autograd function that copies parameters to several devices, and sums the gradients in the devices' order.

    Autograd has a thread for each GPU, so separate copies would return their gradients in a random order.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.root, ctx.count = parameters[0].device, len(parameters)
        # `.data`: small tensors are parts of one transfer, and autograd would treat them as views
        return tuple(copy.data for device in devices for copy in copy_tensors(parameters, device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = [None] * ctx.count
        for first in range(0, len(grads), ctx.count):
            there = [(i, grad) for i, grad in enumerate(grads[first : first + ctx.count]) if grad is not None]
            for (index, _), grad in zip(there, copy_tensors([grad for _, grad in there], ctx.root), strict=True):
                before = sums[index]
                sums[index] = grad if before is None else before + grad
        return None, *sums


def copies_of(module: nn.Module, devices: Sequence[torch.device]) -> list[dict[int, Tensor]]:
    """Return a dict for each device, from the id of each parameter and buffer to its copy on the device.

    On the module's own device the copies are the original tensors. Gradients of copies flow back to the originals.

    Raises:
        ValueError: the module is lazy and not initialized.
    """
    parameters, buffers = list(module.parameters()), list(module.buffers())
    # each replica would initialize weights of its own
    if any(is_lazy(tensor) for tensor in chain(parameters, buffers)):
        raise ValueError("DataParallel: the module is lazy and not initialized. Run a batch through it first.")
    homes = {tensor.device for tensor in chain(parameters, buffers)}
    away = [device for device in devices if homes != {device}]
    trained = [p for p in parameters if p.requires_grad]
    rest = [p for p in parameters if not p.requires_grad]
    moved: list[dict[int, Tensor]] = [{} for _ in away]
    if trained and away:
        # the views are the oldest nodes of the first device's thread, so its backward runs them last: a parameter that
        # is used several times gets its gradients in a fixed order
        copies = CopiesOfAll.apply(away, *[p.view_as(p) for p in trained])
        starts = range(0, len(copies), len(trained))
        moved = [dict(zip(map(id, trained), copies[at : at + len(trained)], strict=True)) for at in starts]
    with torch.no_grad():
        for tensors, device in zip(moved, away, strict=True):
            fixed = [*rest, *buffers]
            tensors.update(zip(map(id, fixed), copy_tensors(fixed, device), strict=True))
        found = iter(moved)
        # on its own device a module's parameters need no copies, but each replica has buffers of its own
        own = {id(p): p for p in parameters}
        copied = [next(found) if homes != {device} else {} for device in devices]
        return [copied_here or {**own, **{id(b): b.clone() for b in buffers}} for copied_here in copied]
