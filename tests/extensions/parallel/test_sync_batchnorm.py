"""SyncBatchNorm in a container, in hand-written loops."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engines.ddp.sync_batchnorm import (
    convert_sync_batchnorm,
)
from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.engines.ddp.test_sync_batchnorm import _images, _net
from tests.tools.pool import RankPool

# -- on ranks, other things than numbers


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
