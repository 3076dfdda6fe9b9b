"""Optimizers that step inside the backward step on the mean of the ranks' gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.testing.pool import RankPool


def train(before: bool) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    fused = copy.deepcopy(plain)
    settings = {"lr": 0.1, "momentum": 0.9}
    if before:
        _apply_optimizer_in_backward(torch.optim.SGD, fused[1].parameters(), settings)
    plain_ddp, fused_ddp = DistributedDataParallel(plain), DistributedDataParallel(fused)
    if not before:
        _apply_optimizer_in_backward(torch.optim.SGD, fused[1].parameters(), settings)
    optimizer = torch.optim.SGD(plain[1].parameters(), **settings)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        micro_batches = torch.randn(2, 4, 3)
        start = copy.deepcopy(fused[1].state_dict())
        for ddp in (plain_ddp, fused_ddp):
            with ddp.no_sync():
                ddp(micro_batches[0]).sum().backward()
        assert all(torch.equal(start[name], value) for name, value in fused[1].state_dict().items())
        for ddp in (plain_ddp, fused_ddp):
            ddp(micro_batches[1]).sum().backward()
        optimizer.step()
        for mine, theirs in zip(plain.parameters(), fused.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert all(parameter.grad is None for parameter in fused[1].parameters())
        assert all(parameter.grad is not None for parameter in fused[0].parameters())
        plain.zero_grad()
        fused.zero_grad()


@pytest.mark.parametrize("before", [True, False], ids=["applied-before-wrapping", "applied-after"])
def test_the_optimizer_steps_once_on_the_mean(ranks: RankPool, before: bool) -> None:
    ranks(2).run(train, before, timeout=60)
