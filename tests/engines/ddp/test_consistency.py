"""Ranks start alike: modules that are compared and sent, and checksums of gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.engines.ddp import consistency
from lockstep.engines.ddp.consistency import (
    broadcast_module_state,
    check_same_module,
    checksum,
    state_tensors,
    sync_buffers,
)
from tests.engines.messages import counted
from tests.tools.pool import RankPool

# -- check_reduction


def test_a_checksum_depends_on_every_bit_and_its_place() -> None:
    grad = torch.randn(5, 4)
    other = grad.clone()
    assert checksum(grad) == checksum(other)
    other[3, 2] = torch.nextafter(other[3, 2], torch.tensor(9.0))
    assert checksum(grad) != checksum(other)
    assert checksum(grad) != checksum(grad.flip(0))
    assert checksum(grad.to(torch.complex64)) != checksum(grad.to(torch.bfloat16))
    assert checksum(torch.eye(3).to_sparse()) == checksum(torch.eye(3).to_sparse())
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


# -- how ranks start -----------------------------------------------------------------------------------------


def _differing(kind: str) -> str:
    odd = dist.get_rank() == 1
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if odd and kind == "shape":
        net[0] = nn.Linear(2, 3)
    elif odd and kind == "order":
        net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    elif odd and kind == "frozen":
        net[1].requires_grad_(False)
    elif odd and kind == "strides":
        net[0].weight = nn.Parameter(torch.ones(2, 2).t())
    elif odd and kind == "buffer":
        net[1].double()
    with pytest.raises(ValueError) as raised:
        check_same_module(net)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", "rank 1 has parameter '0.weight' (torch.float32, shape (3, 2))"),
        ("order", "rank 0 has parameter '0.weight' (torch.float32, shape (2, 2)), rank 1"),
        ("strides", "rank 1 has parameter '0.weight' (torch.float32, shape (2, 2), strides (1, 2))"),
        ("frozen", "rank 1 has parameter '1.weight' (torch.float32, shape (2,), frozen)"),
        ("buffer", "rank 1 has parameter '1.weight' (torch.float64"),
    ],
)
def test_modules_that_differ_are_refused_on_every_rank(ranks: RankPool, kind: str, said: str) -> None:
    first, second = ranks(2).run(_differing, kind)
    assert first == second
    assert said in first


def _alike() -> list[Any]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_same_module(net)
    net[1].num_batches_tracked += dist.get_rank()
    own = net[0].weight.detach().clone()
    sync_buffers(net)
    tracked, kept = int(net[1].num_batches_tracked), torch.equal(own, net[0].weight)
    broadcast_module_state(net)
    return [tracked, kept, net[0].weight.detach().clone()]


def test_state_and_buffers_come_from_rank_zero(ranks: RankPool) -> None:
    first, second = ranks(2).run(_alike)
    assert first[:2] == second[:2] == [0, True]
    assert torch.equal(first[2], second[2])


def _pieces() -> list[str]:
    """Broadcasts, with pieces as small as two layers."""
    net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)])
    with counted() as calls, patch.object(consistency, "PIECE_BYTES", 2 * 64):
        broadcast_module_state(net)
    return calls


def test_the_state_travels_in_pieces(ranks: RankPool) -> None:
    assert ranks(2).run(_pieces) == [["broadcast"] * 3] * 2


def test_shared_tensors_travel_once() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert len(state_tensors(net)) == 3
    assert len(state_tensors(net, {"0.bias"})) == 2
