"""SyncBatchNorm in a container, in hand-written loops."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.engines.ddp.sync_batchnorm import (
    convert_sync_batchnorm,
)
from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.tools.pool import RankPool


class Net(nn.Module):
    """Two normalized layers, of which one may be run again in backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.Tanh())
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=False) if self.again else self.second(x)


def _net(again: bool = False) -> Net:
    torch.manual_seed(3)
    return Net(again).double()


def _images() -> Tensor:
    return torch.randn(6, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def train_in_container(again: bool, own_group: bool) -> dict[str, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group() if own_group else None
    model = DistributedDataParallel(convert_sync_batchnorm(_net(again), group))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(_images().chunk(world)[rank]).square().mean().backward()
        optimizer.step()
    return model.module.state_dict()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_hand_written_loop_trains_as_one_process(ranks: RankPool, world: int) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(_images()).square().mean().backward()
        optimizer.step()
    for found in ranks(world).run(train_in_container, False, world == 3):
        torch.testing.assert_close(found, net.state_dict(), rtol=0, atol=1e-12)


def test_a_recomputed_forward_takes_part_again(ranks: RankPool) -> None:
    """Weights are those without recomputation; running statistics of a layer that ran twice moved twice."""
    plain, again = (ranks(2).run(train_in_container, flag, False)[1] for flag in (False, True))
    weights = dict(_net().named_parameters())
    for name in weights:
        torch.testing.assert_close(again[name], plain[name], rtol=0, atol=1e-12)
    assert again["second.2.num_batches_tracked"] == 2 * plain["second.2.num_batches_tracked"]
