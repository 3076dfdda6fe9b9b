"""Gradients of a model in stages: added up over stages and replicas, and clipped as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import Parameter

from lockstep.engines.engine import Gradients
from lockstep.extensions.balancing.pipeline.layout import Ownership
from lockstep.extensions.balancing.pipeline.weights import WholeModule
from lockstep.ground import comm
from lockstep.ground.comm import grouped
from lockstep.ground.device import widest
from lockstep.ground.rank import waits
from lockstep.ground.transfer import pinned
from lockstep.ground.tree import tree_leaves


class StageGradients(Gradients[WholeModule]):
    """Of a rank that has some of the stages of a module."""

    def load_window_state(self, saved: dict[str, Any]) -> None:
        """Take those that this rank answers for: gradients of what several hold are added up over them."""
        mine = {id(parameter) for parameter in self.holder.owned.mine(list(self.engine.module.parameters()))}
        own = {name for name, parameter in self.engine.named_parameters().items() if id(parameter) in mine}
        given = saved.get("gradients", {})
        super().load_window_state({"gradients": {name: gradient for name, gradient in given.items() if name in own}})


def shapes_of(batch: object) -> Hashable:
    """Equal for batches of equal shapes."""
    return tuple((tuple(each.shape), each.dtype) for each in tree_leaves(batch, Tensor))


def reduce(owned: Ownership, pipeline: comm.Group, peers: comm.Group, replicas: int) -> None:
    """Add up gradients of parameters that several stages hold, then take the mean over the replicas. Collective.

    A parameter that no rank has used keeps no gradient.

    Args:
        owned: what this rank holds.
        pipeline: the ranks of this replica.
        peers: the ranks of the same stage.
        replicas: their number.
    """
    held = {id(parameter) for parameter in owned.held}
    shared = [p for p in owned.shared if p.requires_grad]
    if shared:
        summed = _summed(shared, pipeline, 1.0)
        for parameter, gradient in zip(shared, summed, strict=True):
            if id(parameter) in held:
                parameter.grad = gradient
    own = [p for p in owned.held if p.requires_grad]
    if replicas > 1 and own:
        for parameter, gradient in zip(own, _summed(own, peers, 1.0 / replicas), strict=True):
            parameter.grad = gradient


TOGETHER = 2**23
"""Bytes of small gradients that travel together at most; a large one is summed where it lies."""


def _sum_as_one(
    parameters: Sequence[Parameter], device: torch.device, group: comm.Group, factor: float
) -> list[Tensor]:
    """The sums of small gradients, which travel as one tensor; a gradient that is there takes its sum in place."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=device)
    stretches = flat.split(sizes)
    for stretch, parameter in zip(stretches, parameters, strict=True):
        if parameter.grad is not None:
            stretch.copy_(parameter.grad.reshape(-1))
    _sum_in_place(flat, group, factor)
    return [
        stretch.view(p.shape).clone() if p.grad is None else p.grad.copy_(stretch.view(p.shape))
        for stretch, p in zip(stretches, parameters, strict=True)
    ]


@torch.no_grad()
def _summed(parameters: Sequence[Parameter], group: comm.Group, factor: float) -> list[Tensor | None]:
    """The gradients times a factor, added up over a group, in place; None where none of its ranks has one.

    Who has a gradient is asked on the device, and only a rank that lacks one waits for the answer.
    """
    device = next((p.grad.device for p in parameters if p.grad is not None), parameters[0].device)
    has = [p.grad is not None for p in parameters]
    flags = pinned(torch.tensor(has, dtype=torch.uint8), device).to(device, non_blocking=device.type != "cpu")
    anywhere = comm.all_reduce(flags, "max", group)
    found: list[Tensor | None] = [p.grad for p in parameters]
    for numbers in grouped(parameters, TOGETHER):
        first = found[numbers[0]]
        if len(numbers) == 1 and first is not None and first.is_contiguous():
            _sum_in_place(first, group, factor)
            continue
        together = [parameters[number] for number in numbers]
        for number, gradient in zip(numbers, _sum_as_one(together, device, group, factor), strict=True):
            found[number] = gradient
    if all(has):
        return found
    return [gradient if used else None for gradient, used in zip(found, anywhere.tolist(), strict=True)]


@waits()
def _sum_in_place(tensor: Tensor, group: comm.Group, factor: float) -> None:
    if factor != 1:
        tensor.mul_(factor)
    if comm.carrier(group, tensor.device) == tensor.device:
        dist.all_reduce(tensor, group=group)
    else:
        tensor.copy_(comm.all_reduce(tensor, "sum", group))


def clip_by_norm(
    parameters: Sequence[Parameter], owned: Ownership, bound: float, pipeline: comm.Group, device: torch.device
) -> Tensor:
    """Scale gradients so that the 2-norm of all stages' together is at most ``bound``. Collective.

    Args:
        parameters: of this rank, with gradients; on any devices.
        owned: who answers for those that several ranks hold.
        bound: largest norm.
        pipeline: the ranks of this replica.
        device: of this rank, where it adds up.

    Returns:
        the norm before.
    """
    norms = [torch.linalg.vector_norm(p.grad) for p in owned.mine(parameters) if p.grad is not None]
    there = [norm.to(widest(norm.device)).to(device, non_blocking=True) for norm in norms]
    squares = torch.stack(there).square().sum() if there else torch.zeros((), dtype=widest(device), device=device)
    total = comm.all_reduce(squares, "sum", pipeline).sqrt()
    factor = torch.clamp(bound / (total + 1e-6), max=1.0)
    factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # one copy for each device
    for gradient in (p.grad for p in parameters if p.grad is not None):
        kind = gradient.device, gradient.dtype
        if kind not in factors:
            factors[kind] = factor.to(*kind, non_blocking=True)
        gradient.mul_(factors[kind])
    return total
