"""Several optimizers that step as one: updates, schedulers, states, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon

from lockstep import CombinedOptimizer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def parts(model: nn.Module) -> tuple[Muon, AdamW]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return Muon(matrices, lr=0.02), AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)


def loss(model: nn.Module, step: int) -> Tensor:
    drawn = torch.Generator().manual_seed(step)
    found: Tensor = model(torch.randn(4, 3, generator=drawn, dtype=torch.float64)).square().mean()
    return found


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return values(model)


def test_its_parts_step_as_they_do_alone() -> None:
    model, other = net(), net()
    both = parts(model)
    scheduled = torch.optim.lr_scheduler.StepLR(combined := CombinedOptimizer(*parts(other)), 2, 0.5)
    each = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in both]
    for step in range(5):
        for optimizer in (*both, combined):
            optimizer.zero_grad()
        loss(model, step).backward()
        loss(other, step).backward()
        for optimizer in (*both, combined):
            optimizer.step()
        for scheduler in (*each, scheduled):
            scheduler.step()
    assert [group["lr"] for group in combined.param_groups] == [0.005, 0.0025]
    for one, two in zip(values(model), values(other), strict=True):
        assert torch.equal(one, two)


def test_a_state_goes_into_another_one() -> None:
    model = net()
    combined = CombinedOptimizer(*parts(model))
    trained(model, combined, range(3))
    saved, weights = copy.deepcopy(combined.state_dict()), copy.deepcopy(model.state_dict())
    assert sorted(saved["state"]) == [0, 1, 2, 3]
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2, 3]]
    expected = trained(model, combined, range(3, 6))
    again = net()
    again.load_state_dict(weights)
    other = CombinedOptimizer(*parts(again))
    other.load_state_dict(saved)
    for one, two in zip(trained(again, other, range(3, 6)), expected, strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match="different number of parameter groups: 2, but this CombinedOptimizer has 1"):
        CombinedOptimizer(SGD(again.parameters())).load_state_dict(saved)


def test_a_closure_runs_once_with_gradients_and_hooks_run_around_all() -> None:
    model = net()
    combined = CombinedOptimizer(*parts(model))
    told: list[str] = []
    combined.register_step_pre_hook(lambda *_: told.append("before"))
    combined.register_step_post_hook(lambda *_: told.append("after"))

    def closure() -> Tensor:
        told.append("closure")
        combined.zero_grad()
        found = loss(model, 0)
        found.backward()
        return found

    with torch.no_grad():
        assert combined.step(closure).item() > 0
    assert told == ["before", "closure", "after"]


def test_states_are_read_and_written_through_it() -> None:
    model = net()
    muon, adamw = parts(model)
    combined = CombinedOptimizer(muon, adamw)
    trained(model, combined, range(1))
    weight, bias = model.get_parameter("0.weight"), model.get_parameter("0.bias")
    assert combined.state[weight] is muon.state[weight]
    combined.state[bias] = {"step": 7}
    assert adamw.state[bias] == {"step": 7}
    assert len(combined.state) == len([*combined.state]) == 4
    del combined.state[weight]
    assert weight not in muon.state
    assert weight not in combined.state
    with pytest.raises(KeyError):
        combined.state[torch.ones(1)]


def test_what_cannot_be_combined_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    made = SGD([weight])
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 3\) is in two of its optimizers"):
        CombinedOptimizer(made, Adam([weight]))
    with pytest.raises(ValueError, match="does not support LBFGS"):
        CombinedOptimizer(torch.optim.LBFGS([weight]))
    with pytest.raises(ValueError, match="cannot choose one of its optimizers"):
        CombinedOptimizer(made).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
