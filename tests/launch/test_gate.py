"""The gate: strided tensors are reduced rightly, and calls that do not fit together are named instead of made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.launch.gate import CollectiveMismatch, compared, put_up
from lockstep.testing.pool import RankPool


def _strided(async_op: bool) -> list[Any]:
    before = dist.all_reduce, dist.reduce
    put_up()
    put_up()
    try:
        rank = dist.get_rank()
        everything = torch.full((4, 4), 1.0 + rank)
        work = dist.all_reduce(everything[:, ::2], async_op=async_op)
        if work is not None:
            work.wait()
            assert work.is_completed()
            assert work.get_future().done()
        turned = torch.arange(6.0).view(2, 3).t() * (rank + 1)
        dist.all_reduce(turned, dist.ReduceOp.MAX)
        one = torch.full((4, 4), 1.0 + rank)
        dist.reduce(one[1], 0)
        return [everything, turned, one[1]]
    finally:
        for home in (dist, dist.distributed_c10d):
            home.all_reduce, home.reduce = before


@pytest.mark.parametrize("async_op", [False, True])
def test_strided_tensors_are_reduced_whole(ranks: RankPool, async_op: bool) -> None:
    for rank, (everything, turned, one) in enumerate(ranks(2).run(_strided, async_op)):
        right = torch.full((4, 4), 1.0 + rank)
        right[:, ::2] = 3.0
        assert torch.equal(everything, right)
        assert torch.equal(turned, torch.arange(6.0).view(2, 3).t() * 2)
        assert rank == 1 or torch.equal(one, torch.full((4,), 3.0))


def _calls(kind: str) -> str:
    rank = dist.get_rank()
    first, second = torch.ones(4), torch.ones(4)
    half = dist.new_group([0, 1])
    with compared():
        dist.all_reduce(first)
        dist.barrier()
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, "x" * (rank + 1))
        dist.all_reduce(second, group=half) if rank < 2 else None
        try:
            if kind == "order":
                dist.all_reduce(first) if rank else dist.broadcast(first, 0)
                dist.broadcast(first, 0) if rank else dist.all_reduce(first)
            elif kind == "operation":
                dist.all_reduce(first, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
            elif kind == "shape":
                dist.all_reduce(torch.ones(2, 2) if rank else first)
            elif kind == "dtype":
                dist.all_reduce(torch.ones(4, dtype=torch.int32) if rank else first)
            elif kind == "source":
                dist.broadcast(first, rank)
        except CollectiveMismatch as error:
            return str(error)
    dist.all_reduce(first)  # the comparison has ended
    return f"fine: {first.tolist()}"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("order", "rank 0 calls broadcast(float32 of shape (4,), src=0) at "),
        ("operation", "rank 0 calls all_reduce(float32 of shape (4,), op=SUM) at "),
        ("shape", "rank 1 calls all_reduce(float32 of shape (2, 2), op=SUM) at "),
        ("dtype", "rank 1 calls all_reduce(int32 of shape (4,), op=SUM) at "),
        ("source", "rank 1 calls broadcast(float32 of shape (4,), src=1) at "),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_calls_that_do_not_fit_are_named_on_every_rank(ranks: RankPool, kind: str, says: str, world: int) -> None:
    for error in ranks(world).run(_calls, kind):
        assert says in error
        assert "test_gate.py:" in error


def test_calls_that_fit_are_made(ranks: RankPool) -> None:
    for said in ranks(2).run(_calls, "nothing"):
        assert said == "fine: [4.0, 4.0, 4.0, 4.0]"
