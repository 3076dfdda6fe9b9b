"""Gradients of a pipelined model: sums over stages, means over replicas, and the norm of the full gradient."""

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
    """Access to the gradients on a rank that runs some of a module's pipeline stages."""

    def load_window_state(self, saved: dict[str, Any]) -> None:
        """Restore gradients that were saved in the middle of an accumulation window."""
        # of the parameters that this rank owns only: gradients of shared ones are summed over their holders
        mine = {id(parameter) for parameter in self.holder.owned.mine(list(self.engine.module.parameters()))}
        own = {name for name, parameter in self.engine.named_parameters().items() if id(parameter) in mine}
        given = saved.get("gradients", {})
        super().load_window_state({"gradients": {name: gradient for name, gradient in given.items() if name in own}})


def shapes_of(batch: object) -> Hashable:
    """Return a hashable key that is equal for batches whose tensors have equal shapes and dtypes."""
    return tuple((tuple(each.shape), each.dtype) for each in tree_leaves(batch, Tensor))


def reduce(owned: Ownership, pipeline: comm.Group, peers: comm.Group, replicas: int) -> None:
    """Sum gradients of parameters that several stages share, then average over the replicas. Collective.

    A parameter that no rank has used keeps None.

    Args:
        owned: ranks that store each parameter.
        pipeline: the ranks of this replica.
        peers: the ranks of the same stage.
        replicas: number of replicas.
    """
    local = {id(parameter) for parameter in owned.local}
    shared = [p for p in owned.shared if p.requires_grad]
    if shared:
        # all ranks of the pipeline take part, also in sums of parameters that they do not hold
        summed = _sum(shared, pipeline, 1.0)
        for parameter, gradient in zip(shared, summed, strict=True):
            if id(parameter) in local:
                parameter.grad = gradient
    own = [p for p in owned.local if p.requires_grad]
    if replicas > 1 and own:
        for parameter, gradient in zip(own, _sum(own, peers, 1.0 / replicas), strict=True):
            parameter.grad = gradient


TOGETHER = 2**23
"""Maximum bytes of small gradients that are sent as one tensor. A larger gradient is summed in place."""


@torch.no_grad()
def _sum(parameters: Sequence[Parameter], group: comm.Group, factor: float) -> list[Tensor | None]:
    """Sum gradients in place over a group, multiply by ``factor``, and return them; None if no rank has a gradient."""
    device = next((p.grad.device for p in parameters if p.grad is not None), parameters[0].device)
    has = [p.grad is not None for p in parameters]
    # the flags are reduced on the device, so that only a rank that lacks a gradient waits for the result
    flags = pinned(torch.tensor(has, dtype=torch.uint8), device).to(device, non_blocking=device.type != "cpu")
    anywhere = comm.all_reduce(flags, "max", group)
    found: list[Tensor | None] = [p.grad for p in parameters]
    for numbers in grouped(parameters, TOGETHER):
        first = found[numbers[0]]
        if len(numbers) == 1 and first is not None and first.is_contiguous():
            _sum_in_place(first, group, factor)
            continue
        sizes = [parameters[number].numel() for number in numbers]
        flat = torch.zeros(sum(sizes), dtype=parameters[numbers[0]].dtype, device=device)
        pieces = flat.split(sizes)
        for piece, number in zip(pieces, numbers, strict=True):
            gradient = found[number]
            if gradient is not None:
                piece.copy_(gradient.reshape(-1))
        _sum_in_place(flat, group, factor)
        for piece, number in zip(pieces, numbers, strict=True):
            gradient, total = found[number], piece.view(parameters[number].shape)
            # the user may refer to a gradient, so its sum goes into the same tensor
            found[number] = total.clone() if gradient is None else gradient.copy_(total)
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
    """Scale gradients so that the 2-norm of the full model's gradient is at most ``bound``. Collective.

    Args:
        parameters: this rank's parameters with gradients, on any devices.
        owned: owners of the parameters.
        bound: largest norm.
        pipeline: the ranks of this replica.
        device: this rank's device, for the sum.

    Returns:
        the norm before.
    """
    # of owned parameters only: a parameter with several holders counts once
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
