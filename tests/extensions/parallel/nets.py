"""A small net in double precision, and batches for it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def make_net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(2)
    layers: list[nn.Module] = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(5))
    return nn.Sequential(*layers).double()


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def expected(step: int) -> list[Tensor]:
    """Gradients of one process in a step with the batches of two ranks."""
    net = make_net()
    for rank in range(2):
        (net(batch_of(step, rank)).square().mean() / 2).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def is_right(model: nn.Module, step: int = 0) -> bool:
    """Whether a step of ``model`` (weights as of `make_net`) on two ranks has the gradients of one process."""
    model.zero_grad()
    model(batch_of(step, dist.get_rank())).square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    pairs = zip(grads, expected(step), strict=True)
    return all(bool((grad - right).abs().max() <= 1e-12 * right.abs().max()) for grad, right in pairs)
