"""The reducer under backwards that a container does not show: nested ones, another plan in a window, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.engines.ddp.reducer import Reducer
from tests.engines.ddp.rounds import assert_close, reduced
from tests.tools.pool import RankPool

Loss = Callable[[nn.Module, int, int], Tensor]


class Loop(nn.Module):
    """Goes through the same layers several times, with or without checkpoints: their weights are shared."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.last = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor, times: int = 3) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            if self.reentrant is None:
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


def _loop(reentrant: bool | None) -> Loop:
    torch.manual_seed(5)
    return Loop(reentrant).double()


def _batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator)


def _train(net: nn.Module, loss_of: Loss, steps: int, ranks: list[int], reducer: Reducer | None) -> list[Any]:
    """SGD on the mean of the ranks' losses; gradients of every step."""
    found = []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            loss = loss_of(net, step, rank)
            if reducer is not None:
                reduced(reducer, loss)
            else:
                (loss / len(ranks)).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return found


def _square(net: nn.Module, step: int, rank: int) -> Tensor:
    # more turns on one rank than on the other, more in one step than in another
    return net(_batch(step, rank), 1 + (step + rank) % 3).square().mean()


def _checkpointed(reentrant: bool | None) -> tuple[list[Any], bool]:
    net = _loop(reentrant)
    reducer = Reducer(net.named_parameters(), bucket_cap_mb=0.0005, first_bucket_mb=0.0005)
    found = _train(net, _square, 4, [dist.get_rank()], reducer)
    return found, reducer._overlap


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_shared_layers_and_checkpoints(ranks: RankPool, reentrant: bool | None) -> None:
    expected = _train(_loop(None), _square, 4, [0, 1, 2], None)
    for found, overlap in ranks(3).run(_checkpointed, reentrant):
        assert_close(found, expected)
        # rank 0's first loss has one nested backward besides the outer one, so that all ranks see them nest
        assert overlap is (reentrant is not True)


def _late_nesting() -> str:
    net = _loop(None)
    reducer = Reducer(net.named_parameters(), bucket_cap_mb=0.0005, first_bucket_mb=0.0005)
    _train(net, _square, 2, [dist.get_rank()], reducer)
    net.reentrant = True
    reducer.prepare()
    with pytest.raises(RuntimeError) as raised:
        net(_batch(0, 0), 3).sum().backward()
    for bucket in reducer.buckets:
        if bucket.work is not None:
            reducer._transport.wait(bucket)
    with pytest.raises(RuntimeError, match="Restart from a checkpoint"):
        reducer.prepare()
    return str(raised.value)


def test_backwards_that_nest_only_later_are_refused_not_wrong(ranks: RankPool) -> None:
    for said in ranks(2).run(_late_nesting):
        assert "'block.0.weight'" in said
        assert "use_reentrant=False" in said


def _replanned() -> tuple[list[list[str]], list[Any]]:
    """A new layout in the middle of a window keeps what was accumulated."""
    net = _loop(None)
    reducer = Reducer(net.named_parameters())
    plan = [[name] for name, _ in net.named_parameters()]
    for step in range(2):
        reducer.sync = step == 1
        reduced(reducer, _square(net, step, dist.get_rank()))
        if step == 0:
            reducer.replan(plan)
    with pytest.raises(ValueError, match="no parameter 'gone'"):
        reducer.replan([["gone"]])
    return reducer.plan(), [p.grad for p in net.parameters()]


def test_another_plan_keeps_what_was_accumulated(ranks: RankPool) -> None:
    alone = _loop(None)
    for step in range(2):
        for rank in range(2):
            (_square(alone, step, rank) / 2).backward()
    for plan, grads in ranks(2).run(_replanned):
        assert plan == [[name] for name, _ in alone.named_parameters()]
        assert_close([grads], [[p.grad for p in alone.parameters()]])


def _kinds() -> dict[str, Any]:
    rank = dist.get_rank()
    parameters = {
        "half": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "complex": nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        "double": nn.Parameter(torch.ones(3, dtype=torch.float64)),
        "image": nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        "unused": nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        "table": nn.Parameter(torch.ones(5, 2)),
    }
    reducer = Reducer(parameters.items())
    reducer.prepare()
    loss = sum((p * (rank + 1)).abs().sum().double() for n, p in parameters.items() if n != "unused")
    rows = nn.functional.embedding(torch.tensor([rank, rank]), parameters["table"], sparse=True)
    (loss + rows.sum()).backward()  # type: ignore[union-attr]
    reducer.finish()
    same = parameters["image"].stride() == parameters["image"].grad.stride()  # type: ignore[union-attr]
    grads = {name: p.grad for name, p in parameters.items()}
    return {"grads": grads, "strides": same, "plan": reducer.plan()}


def test_dtypes_strides_and_sparse_gradients(ranks: RankPool) -> None:
    for found in ranks(2).run(_kinds):
        grads = found["grads"]
        assert grads["unused"] is None
        for name in ("half", "complex", "double", "image"):
            assert bool((grads[name] == 1.5).all()), name
        assert grads["table"].tolist() == [[2.5, 2.5], [2.5, 2.5], [1.5, 1.5], [1.5, 1.5], [1.5, 1.5]]
        assert found["strides"]
        assert len(found["plan"]) == 4  # one for each dtype
