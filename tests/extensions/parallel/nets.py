"""A small net in double precision, and batches for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make_net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(2)
    layers: list[nn.Module] = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(5))
    return nn.Sequential(*layers).double()


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
