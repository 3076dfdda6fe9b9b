"""Transports, as far as they do not need a GPU to show what they would do on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engines.ddp.container import DistributedDataParallel
from lockstep.engines.ddp.hooks.hook_transport import HookTransport
from lockstep.engines.ddp.shared_memory import SharedReduction
from lockstep.engines.ddp.transport import AllReduce, UsedParameters
from lockstep.ground import comm
from tests.tools.pool import RankPool

# -- transports, as far as they do not need a gpu to show what they would do on one --------------------------


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("cpu", True)])
def test_a_hook_waits_for_the_last_one_on_gloo_only(monkeypatch: pytest.MonkeyPatch, device: str, waits: bool) -> None:
    """Beside gloo for CPU tensors ("cpu:gloo,cuda:nccl", torch's default) NCCL's waited, and overlapped no more."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(comm, "world_size", lambda group: 2)
    monkeypatch.setattr(AllReduce, "buffers", lambda self, sizes: [])
    hooked: Any = HookTransport(None, None, lambda state, bucket: torch.futures.Future(), list, lambda: None)
    hooked.buffers([(4, torch.float32, torch.device(device, 0))])
    hooked._last = torch.futures.Future()
    asked: list[bool] = []
    monkeypatch.setattr(torch.futures.Future, "wait", lambda self: asked.append(True))
    hooked.flush()
    assert asked == [True] * waits


# -- the message of used flags ------------------------------------------------------------------------------------


class Used:
    """As much of a bucket as the message looks at."""

    def __init__(self, *used: int) -> None:
        self.used = bytearray(used)
        self.names = [f"{len(used)}.{index}" for index in range(len(used))]


def _heard(used: list[list[list[int]]], willing: list[bool]) -> tuple[list[list[int]], bool]:
    rank = dist.get_rank()
    message = UsedParameters([Used(*marks) for marks in used[rank]], willing[rank], None)  # type: ignore[misc]
    assert message.nbytes == 1 + sum(map(len, used[rank]))
    parts, agreed = message.wait()
    return [[int(mark != 0) for mark in part or ()] for part in parts], agreed


def test_each_rank_hears_who_used_what(ranks: RankPool) -> None:
    used = [[[1, 1], [1]], [[0, 1], [0]], [[1, 0], [0]]]
    assert ranks(3).run(_heard, used, [False, True, False]) == [([[1, 1], [1]], False)] * 3
    used[0] = [[0, 1], [0]]
    assert ranks(3).run(_heard, used, [True] * 3) == [([[1, 1], [0]], True)] * 3


def _heard_of_this_backward(arrived: list[list[str]], willing: bool) -> list[list[bool]]:
    rank = dist.get_rank()
    buckets: Any = [Used(1, 1), Used(rank)]
    parts, _ = UsedParameters(buckets, willing, None, arrived[rank]).wait()
    return [[mark == UsedParameters.ARRIVED for mark in part or ()] for part in parts]


def test_each_rank_hears_what_came_in_this_backward(ranks: RankPool) -> None:
    """A held gradient counts as used, and later backwards are not held to it."""
    arrived = [["2.0"], ["1.0"]]
    assert ranks(2).run(_heard_of_this_backward, arrived, True) == [[[True, False], [True]]] * 2
    assert ranks(2).run(_heard_of_this_backward, arrived, False) == [[[False, False], [False]]] * 2


def test_who_used_everything_does_not_look() -> None:
    """Looking is waiting: a GPU would come to an end with its backward in every round of a communication hook."""
    everything: Any = UsedParameters([Used(1, 1), Used(1)], False, None)  # type: ignore[list-item]
    everything._flags = None
    assert everything.wait() == ([b"\1\1", b"\1"], False)
    for used, willing in (((1, 1), True), ((1, 0), False)):
        looks: Any = UsedParameters([Used(*used)], willing, None)  # type: ignore[list-item]
        assert looks.wait() == ([list(used)], willing)


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
        assert "'unused.weight' got a gradient" in said


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
