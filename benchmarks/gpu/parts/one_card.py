"""Two ranks on one device, over gloo: the numbers of one process, and the same bits on both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.checks import Numbers, Part, Skip, expect
from benchmarks.gpu.equal import run_alike, run_equal
from lockstep.testing import SharedCard

WORLD = 2
COUNTS = (2, 4)
"""Batches of the two ranks."""


def run(part: Part) -> None:
    """Each case, with a fresh group."""
    if not (part.is_cuda or part.on_cpu):
        part.check("two ranks on one device", _left_out, part)
        return
    accelerator: Any = SharedCard() if part.is_cuda else "cpu"
    run_equal(part, WORLD, accelerator)
    run_alike(part, WORLD, accelerator)
    part.check("join: ranks with different numbers of batches", joined, part)


def _left_out(part: Part) -> Numbers:
    raise Skip(f"lockstep.testing.SharedCard is for CUDA devices, not for {part.device}")


def joined(part: Part) -> Numbers:
    """Under ``join`` over the container, against one process that has the batches of those still there."""
    found = part.ranks(WORLD, in_join, part.device)
    right = alone(part.device)
    sizes = [(one - other).abs().max().item() for each in found for one, other in zip(each, right, strict=True)]
    numbers = {"largest difference": max(sizes)}
    expect(max(sizes) < 1e-12, "ranks and one process differ", numbers)
    return numbers


def network(device: str) -> nn.Module:
    """The same at each call."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double().to(device)


def batch(step: int, rank: int, device: str) -> Tensor:
    """That of a rank's step."""
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, dtype=torch.float64, generator=source).to(device)


def in_join(device: str) -> list[Tensor]:
    """On a rank: its parameters at the end."""
    from lockstep import DistributedDataParallel

    rank, net = dist.get_rank(), network(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(COUNTS[rank]):
            optimizer.zero_grad()
            model(batch(step, rank, device)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


def alone(device: str) -> list[Tensor]:
    """What one process has at the end."""
    net = network(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        there = [rank for rank in range(WORLD) if step < COUNTS[rank]]
        for rank in there:
            (net(batch(step, rank, device)).square().mean() / len(there)).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]
