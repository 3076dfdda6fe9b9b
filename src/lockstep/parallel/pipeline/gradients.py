"""Gradients of a model in stages: added up over stages and replicas, and clipped as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lockstep.ground import comm
from lockstep.ground.device import widest
from lockstep.ground.tree import tree_leaves
from lockstep.parallel.pipeline.layout import Ownership


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


def _summed(parameters: Sequence[Parameter], group: comm.Group, factor: float) -> list[Tensor | None]:
    """The gradients added up over a group, by one all-reduce for each dtype; None where none of its ranks has one."""
    device = next((p.grad.device for p in parameters if p.grad is not None), parameters[0].device)
    there = comm.all_reduce(torch.tensor([float(p.grad is not None) for p in parameters], device=device), "max", group)
    found: list[Tensor | None] = [None] * len(parameters)
    used = [number for number, is_used in enumerate(there.tolist()) if is_used]
    for dtype in sorted({parameters[number].dtype for number in used}, key=str):
        alike = [number for number in used if parameters[number].dtype is dtype]
        sizes = [parameters[number].numel() for number in alike]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        for number, stretch in zip(alike, flat.split(sizes), strict=True):
            gradient = parameters[number].grad
            if gradient is not None:
                stretch.copy_(gradient.reshape(-1)).mul_(factor)
        for number, stretch in zip(alike, comm.all_reduce(flat, "sum", group).split(sizes), strict=True):
            found[number] = stretch.view(parameters[number].shape)
    return found


def clip_by_norm(
    parameters: Sequence[Parameter], owned: Ownership, bound: float, pipeline: comm.Group, device: torch.device
) -> None:
    """Scale gradients so that the 2-norm of all stages' together is at most ``bound``. Collective.

    Args:
        parameters: of this rank, with gradients; on any devices.
        owned: who answers for those that several ranks hold.
        bound: largest norm.
        pipeline: the ranks of this replica.
        device: of this rank, where it adds up.
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
