"""Collectives of a device's tensors by way of the host, and of the made-up device, against gloo's on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.testing import host_group
from tests.tools.pool import RankPool

WORLD = 3


def collectives(device: str) -> dict[str, list[Tensor]]:
    """The results of each on this rank, on the CPU."""
    rank, found = dist.get_rank(), {}

    def made(*shape: int) -> Tensor:
        values = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
        return (values + 100 * rank).to(device)

    def keep(name: str, *tensors: Tensor) -> None:
        found[name] = [each.cpu().clone() for each in tensors]

    for op in ("SUM", "MAX", "PRODUCT"):
        x = made(4)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        keep(op, x)
    x = made(3, 2)
    dist.broadcast(x, 1)
    keep("broadcast", x)
    x = made(2)
    dist.reduce(x, 2)
    keep("reduce", *([x] if rank == 2 else []))
    many = [made(2) for _ in range(WORLD)]
    dist.all_gather(many, made(2))
    keep("all_gather", *many)
    whole = made(WORLD * 2)
    dist.all_gather_into_tensor(whole, made(2))
    keep("all_gather_into_tensor", whole)
    part = made(2)
    dist.reduce_scatter_tensor(part, made(WORLD * 2))
    keep("reduce_scatter_tensor", part)
    part = made(2)
    dist.reduce_scatter(part, [made(2) + number for number in range(WORLD)])
    keep("reduce_scatter", part)
    dist.gather(made(2), many if rank == 0 else None, dst=0)
    keep("gather", *(many if rank == 0 else []))
    part = made(2)
    dist.scatter(part, [made(2) + number for number in range(WORLD)] if rank == 1 else None, src=1)
    keep("scatter", part)
    parts = made(WORLD * 2)
    dist.all_to_all_single(parts, made(WORLD * 2))
    keep("all_to_all_single", parts)
    begun = [
        dist.isend(made(2), (rank + 1) % WORLD),
        dist.irecv(part, (rank - 1) % WORLD),
    ]  # both before either is done
    for each in begun:
        assert each is not None
        each.wait()
    keep("messages", part)
    x = made(2)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    keep("future", work.get_future().wait()[0])
    dist.barrier()
    return found


def mean(device: str) -> Tensor:
    x = torch.full((2,), float(dist.get_rank()), device=device)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x.cpu()


def grouped(function: Any, device: str, backend: str, folder: str) -> Any:
    host_group.register()
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, init_method=f"file://{folder}", rank=rank, world_size=WORLD)
    return function(device)


@pytest.mark.parametrize("backend", ["by_host", "madeupccl"])
def test_each_collective_gives_what_gloos_gives(madeup: RankPool, tmp_path: Any, backend: str) -> None:
    both = f"cpu:gloo,madeup:{backend}"
    ours = madeup(WORLD).run(grouped, collectives, "madeup", both, f"{tmp_path}/a", group=False)
    theirs = madeup(WORLD).run(grouped, collectives, "cpu", "gloo", f"{tmp_path}/b", group=False)
    for own, expected in zip(ours, theirs, strict=True):
        assert own.keys() == expected.keys()
        for name, values in expected.items():
            assert len(own[name]) == len(values)
            assert all(map(torch.equal, own[name], values)), name


def test_it_averages(madeup: RankPool, tmp_path: Any) -> None:
    """Which gloo does not."""
    found = madeup(WORLD).run(grouped, mean, "madeup", "cpu:gloo,madeup:by_host", f"{tmp_path}/a", group=False)
    assert all(x.tolist() == [1.0, 1.0] for x in found)
