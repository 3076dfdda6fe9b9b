"""Gradients that autograd leaves undefined: a parameter that is visited and gets nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.tools.pool import RankPool


class Stop(torch.autograd.Function):
    """Gives nothing back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> None:
        return None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stopped = nn.Linear(80, 80, bias=False)  # big: put into its bucket when its gradient comes
        self.layer = nn.Linear(80, 2)

    def forward(self, x: Tensor, stops: bool) -> Tensor:
        stopped = self.stopped(x)
        return self.layer((Stop.apply(stopped) if stops else stopped) + x)


def behind_a_function(stops_on: list[int]) -> list[list[Tensor | None]]:
    rank = dist.get_rank()
    model = DistributedDataParallel(Net())
    found = []
    for step in range(4):
        model.zero_grad()
        model(torch.full((1, 80), step + 1.0), rank in stops_on).sum().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


@pytest.mark.parametrize("stops_on", [[0, 1], [1]])
def test_a_function_that_gives_nothing_back_leaves_no_gradient_behind_it(ranks: RankPool, stops_on: list[int]) -> None:
    net = Net()
    for found in ranks(2).run(behind_a_function, stops_on):
        for step, grads in enumerate(found):
            net.zero_grad()
            for rank in range(2):
                (net(torch.full((1, 80), step + 1.0), rank in stops_on).sum() / 2).backward()
            for mine, parameter in zip(grads, net.parameters(), strict=True):
                assert (mine is None) == (parameter.grad is None)
                if mine is not None:
                    torch.testing.assert_close(mine, parameter.grad)


def nothing_at_all() -> list[bool]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    found = []
    for nothing in (False, True, False):
        model.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        (Stop.apply(loss) if nothing else loss).backward()
        found.append(all((p.grad is None) == nothing for p in model.parameters()))
    return found


def test_a_loss_that_gives_nothing_back_leaves_no_gradients(ranks: RankPool) -> None:
    assert ranks(2).run(nothing_at_all) == [[True] * 3] * 2
