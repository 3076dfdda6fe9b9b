"""Buckets that no rank uses are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engines.ddp.shared_memory import SharedReduction
from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.tools.pool import RankPool

# -- ``skip_all_reduce_unused_params`` -----------------------------------------------------------------------


ROUNDS = 4


class Net(nn.Module):
    """Two layers, another that nobody uses in between, and one that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 80, bias=False)
        self.unused = nn.Linear(80, 80, bias=False)
        self.sometimes = nn.Linear(80, 80, bias=False)
        self.last = nn.Linear(80, 2, bias=False)

    def forward(self, x: Tensor, rank: int, wakes: bool = False) -> Tensor:
        x = self.first(x)
        if rank == 1:
            x = x + self.sometimes(x)
        if wakes:
            x = self.unused(x)
        return self.last(x)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def grads_of(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def trained(skip: bool, **settings: Any) -> tuple[list[dict[str, Tensor | None]], list[list[str]], bool]:
    """Gradients by round, the buckets that are left out, and whether the others go through shared memory."""
    net, rank = Net(), dist.get_rank()
    model = DistributedDataParallel(net, bucket_cap_mb=0.01, skip_all_reduce_unused_params=skip, **settings)
    found = []
    for step in range(ROUNDS):
        model.zero_grad()
        with model.no_sync():
            model(batch(step, rank), rank).sum().backward()
        model(batch(step + 5, rank), rank).sum().backward()
        found.append(grads_of(net))
    transport: Any = model.reducer._transport
    left_out = [model.reducer.plan()[index] for index in transport.skipped] if skip else []
    return found, left_out, isinstance(transport.inner if skip else transport, SharedReduction)


def both() -> list[tuple[list[dict[str, Tensor | None]], list[list[str]], bool]]:
    return [trained(False), trained(True), trained(True, shared_memory=False)]


def test_a_bucket_that_no_rank_uses_is_left_out_and_gradients_are_the_same(ranks: RankPool) -> None:
    for (expected, *_), *skipping in ranks(2).run(both):
        for found, left_out, _ in skipping:
            assert left_out == [["unused.weight"]]
            for mine, theirs in zip(found, expected, strict=True):
                assert mine["unused.weight"] is None
                assert mine["sometimes.weight"] is not None
                for name, grad in theirs.items():
                    assert (grad is None) == (mine[name] is None), name
                    assert grad is None or torch.equal(grad, mine[name]), name  # type: ignore[arg-type]
        assert [shared for *_, shared in skipping] == [True, False]


def waking() -> str:
    rank = dist.get_rank()
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01, skip_all_reduce_unused_params=True)
    with model.weight(0):  # nobody uses anything in this round, which says nothing
        model(batch(0, rank), rank).sum().backward()
    for step in range(3):
        model(batch(step, rank), rank).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        model(batch(9, rank), rank, wakes=True).sum().backward()
    return str(raised.value)


def test_a_parameter_that_is_used_later_is_named(ranks: RankPool) -> None:
    for said in ranks(2).run(waking):
        assert "'unused.weight' has a gradient" in said


def no_memory() -> tuple[list[dict[str, Tensor | None]], list[list[str]], bool]:
    buffers = SharedReduction.buffers
    SharedReduction.buffers = lambda self, sizes: None  # type: ignore[method-assign]
    try:
        return trained(True)
    finally:
        SharedReduction.buffers = buffers  # type: ignore[method-assign]


def test_without_room_in_memory_buckets_go_over_tcp(ranks: RankPool) -> None:
    expected = ranks(2).run(trained, True)
    for (found, _, shared), (grads, *_) in zip(ranks(2).run(no_memory), expected, strict=True):
        assert not shared
        for mine, theirs in zip(found, grads, strict=True):
            for name, grad in theirs.items():
                assert grad is None or torch.equal(grad, mine[name]), name  # type: ignore[arg-type]
