"""Batches of different sizes: gradients are the mean over ranks, weighted by what each batch counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.tools.pool import RankPool

SIZES = [[5, 2, 3], [4, 4, 4], [3, 0, 1], [0, 0, 7], [1, 6, 0]]
"""Samples by step and rank."""


@dataclass
class Answer:
    value: Tensor
    again: dict[str, Any]


class Net(nn.Module):
    """One of its outputs is made of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.spare = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Answer:
        hidden = self.trunk(x).tanh()
        return Answer(hidden, {"head": (self.head(hidden), self.spare.bias)})


def _net() -> Net:
    torch.manual_seed(2)
    return Net().double()


def _samples(step: int) -> Tensor:
    return torch.randn(sum(SIZES[step]), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _loss(answer: Answer) -> Tensor:
    head, bias = answer.again["head"]
    return head.square().mean() + answer.value.sin().mean() + (bias * torch.arange(2)).sum()


def _grads(net: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]


def _weighed(accumulate: bool) -> list[list[Tensor]]:
    net = _net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step, sizes in enumerate(SIZES):
        rank = dist.get_rank()
        mine = _samples(step).split(sizes)[rank]
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync(), model.weight(4):
                answer = model(torch.ones(4, 4, dtype=torch.float64) * (rank + 1))
            _loss(answer).backward()
        # a rank without samples borrows one, whose loss is not even a number
        with model.weight(len(mine)):
            answer = model(mine if len(mine) else torch.full((1, 4), torch.inf, dtype=torch.float64))
        _loss(answer).backward()
        found.append(_grads(net))
        optimizer.step()
    return found


def _whole(accumulate: bool) -> list[list[Tensor]]:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for step in range(len(SIZES)):
        optimizer.zero_grad()
        if accumulate:
            ones = torch.ones(4, 4, dtype=torch.float64)
            _loss(net(torch.cat([ones, 2 * ones, 3 * ones]))).backward()
        _loss(net(_samples(step))).backward()
        found.append(_grads(net))
        optimizer.step()
    return found


@pytest.mark.parametrize("accumulate", [False, True])
def test_uneven_batches_have_the_gradients_of_the_whole_batch(ranks: RankPool, accumulate: bool) -> None:
    expected = _whole(accumulate)
    for found in ranks(3).run(_weighed, accumulate):
        for mine, right in zip(found, expected, strict=True):
            for grad, reference in zip(mine, right, strict=True):
                assert (grad - reference).abs().max() <= 1e-12 * reference.abs().max().clamp_min(1e-3)


def _fractions() -> list[Tensor]:
    net = nn.Linear(1, 1, bias=False).double()
    model = DistributedDataParallel(net)
    grads = []
    for weights in ([0.25, 0.75], [0, 0], [2, 2]):
        net.zero_grad()
        with model.weight(weights[dist.get_rank()]):
            output = model(torch.full((1, 1), 1.0 + dist.get_rank(), dtype=torch.float64))
        output.sum().backward()
        grads.append(torch.zeros(1, 1) if net.weight.grad is None else net.weight.grad.clone())
    return grads


def test_weights_may_be_fractions_or_all_nothing(ranks: RankPool) -> None:
    for quarter, nothing, even in ranks(2).run(_fractions):
        assert quarter.item() == 1.75
        assert nothing.item() == 0
        assert even.item() == 1.5


def _alone() -> list[float]:
    net = nn.Linear(1, 1, bias=False).double()
    model = DistributedDataParallel(net)
    found = []
    for n in (3, 0):
        with model.weight(n):
            output = model(torch.ones(1, 1, dtype=torch.float64))
        output.sum().backward()
        found.append(float(net.weight.grad))  # type: ignore[arg-type]
    return found


def test_on_one_rank_a_weight_is_one_unless_it_is_nothing(ranks: RankPool) -> None:
    assert ranks(1).run(_alone) == [[1.0, 1.0]]


def _refused() -> list[str]:
    class Holder:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Hiding(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Holder(super().forward(x))

    model = DistributedDataParallel(Hiding(1, 1))
    said = []
    for n in (-1, float("nan")):
        with pytest.raises(ValueError) as wrong, model.weight(n):
            pass
        said.append(str(wrong.value))
    with pytest.raises(TypeError) as hidden, model.weight(1):
        model(torch.ones(1, 1))
    said.append(str(hidden.value))
    with pytest.raises(ValueError) as both, model.join(), model.weight(1):
        model(torch.ones(1, 1))
    return [*said, str(both.value)]


def test_weights_that_cannot_be_are_refused(ranks: RankPool) -> None:
    for negative, nan, hidden, joined in ranks(2).run(_refused):
        assert negative.startswith("weight(-1) on rank")
        assert nan.startswith("weight(nan) on rank")
        assert "output (Holder) is or contains an object with tensors as attributes" in hidden
        assert joined.startswith("weight() inside join()")
