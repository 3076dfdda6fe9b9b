"""Optimizers whose states ranks share out: the numbers of one process, states in checkpoints, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engines.ddp.owned_optimizer import OwnedOptimizers
from lockstep.engines.owners import check_parameter_wise, owners_of, parameter_wise, update_within
from lockstep.ground import rank as rank_of
from tests.equivalence.models import same
from tests.tools.pool import RankPool


def batch_of(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 2, 7, generator=generator, dtype=torch.float64).to(dtype)


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


# -- what is around a step -----------------------------------------------------------------------------------


def _unfreezes() -> tuple[dict[str, Tensor], int, Any]:
    net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7)).double()
    torch.manual_seed(5)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net[0].requires_grad_(False)
    optimizer = torch.optim.Adam(net[1].parameters(), 0.01)
    OwnedOptimizers([optimizer])
    for step in range(4):
        if step == 2:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.1})
        optimizer.zero_grad()
        net(batch_of(step, 0)).square().mean().backward()  # the same on all ranks
        optimizer.step()
    return values(net), len(optimizer.state), optimizer.state_dict()


def test_what_is_unfrozen_gets_an_owner(ranks: RankPool) -> None:
    ((expected, _, state),) = ranks(1).run(_unfreezes)
    found = ranks(3).run(_unfreezes)
    for weights, _, theirs in found:
        assert same(weights, expected)
        assert same(theirs, state)
    assert sum(count for _, count, _ in found) == 4


# -- owners, and who has none --------------------------------------------------------------------------------


def test_the_largest_come_first_to_who_has_least() -> None:
    load = [0, 0, 0]
    assert owners_of([1, 10, 3, 3, 4], load) == [1, 0, 2, 2, 1]
    assert load == [10, 5, 6]
    assert owners_of([2], load) == [1]


def _uneven() -> list[str]:
    rank_of._warned.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        OwnedOptimizers([torch.optim.Adam([nn.Parameter(torch.ones(90)), nn.Parameter(torch.ones(10))])])
        OwnedOptimizers([torch.optim.Adam([nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))])])
    return [str(warning.message) for warning in told]


def test_a_parameter_that_is_too_large_to_be_shared_out_is_told(ranks: RankPool) -> None:
    ((said,), _) = ranks(2).run(_uneven)
    assert "one rank stores 90% of the optimizer states instead of 50%" in said
    assert 'use strategy="fsdp"' in said


class _Same(torch.optim.Adam):
    """Another constructor, the same update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class _Other(torch.optim.Adam):
    """Another update."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be sharded, because its line search"),
        (torch.optim.SparseAdam, "SparseAdam cannot be sharded, because its gradients are sparse"),
        (_Other, "_Other cannot be sharded, because it is not known .*`@lockstep.parameter_wise`"),
        (lambda p: torch.optim.Adam(p, differentiable=True), r"Adam\(differentiable=True\)"),
        (lambda p: torch.optim.SGD(p, torch.tensor(0.1), differentiable=True), r"SGD\(differentiable=True\)"),
    ],
)
def test_optimizers_that_need_all_parameters_are_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_parameter_wise([make([nn.Parameter(torch.ones(2, 2))])])


def test_a_subclass_with_the_same_update_and_a_declared_one_are_taken() -> None:
    @parameter_wise
    class Declared(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    weight = nn.Parameter(torch.ones(2))
    check_parameter_wise([_Same([weight]), Declared([weight], 0.1)])


# -- within an update ----------------------------------------------------------------------------------------


class _Noted(torch.optim.SGD):
    """Notes its update; calls the step of its base, whose hooks run once more."""

    told: list[str]

    def step(self, closure: Any = None) -> Any:
        self.told.append("update")
        return super().step(closure)


@contextmanager
def _inside(told: list[str]) -> Iterator[None]:
    told.append("in")
    try:
        yield
    finally:
        told.append("out")


def _noted() -> _Noted:
    optimizer = _Noted([nn.Parameter(torch.ones(1))], 0.1)
    told = optimizer.told = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    return optimizer


def test_hooks_run_outside_and_the_update_inside() -> None:
    optimizer = _noted()
    told = optimizer.told
    with update_within(optimizer, _inside(told)):
        optimizer.step()
    # the hooks of the base's step, in the middle, belong to the update
    assert told == ["before", "in", "update", "before", "after", "out", "after"]
    told.clear()
    optimizer.step()
    assert told == ["before", "update", "before", "after", "after"]
