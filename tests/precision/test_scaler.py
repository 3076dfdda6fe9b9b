"""The loss scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.ground.errors import MisconfigurationException
from lockstep.precision.base import LossScaler


def one_weight(value: float = 1.0) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.tensor([value]))
    return weight, torch.optim.SGD([weight], lr=0.5)


def test_gradients_are_the_true_ones_after_unscale_and_the_step_is_the_plain_one() -> None:
    weight, optimizer = one_weight()
    scaler = LossScaler("cpu", init_scale=1024.0)
    scaler.scale((3 * weight).sum()).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 3 * 1024
    scaler.unscale(optimizer)
    assert weight.grad.item() == 3
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 1 - 0.5 * 3
    assert scaler.get_scale() == 1024.0


def test_an_overflow_leaves_the_step_out_and_halves_the_scale() -> None:
    weight, optimizer = one_weight()
    scaler = LossScaler("cpu", init_scale=1024.0)
    scaler.scale((torch.inf * weight).sum()).backward()
    scaler.unscale(optimizer)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert weight.item() == 1
    assert scaler.get_scale() == 512.0


def test_no_gradients_are_no_error() -> None:
    """torch's own scaler asserts that it has seen some."""
    weight, optimizer = one_weight()
    scaler = LossScaler("cpu", init_scale=1024.0)
    scaler.unscale(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 1
    assert scaler.get_scale() == 1024.0


def test_two_optimizers_of_which_one_has_no_gradients() -> None:
    weight, optimizer = one_weight()
    idle_weight, idle = one_weight()
    scaler = LossScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(weight.sum()).backward()
    for each in (optimizer, idle):
        scaler.unscale(each)
        scaler.step(each)
    scaler.update()
    assert (weight.item(), idle_weight.item()) == (0.5, 1.0)
    assert scaler.get_scale() == 2048.0


def test_lbfgs_is_refused() -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(1))])
    with pytest.raises(MisconfigurationException, match=r"precision='16-mixed' does not support LBFGS.*Use precision="):
        LossScaler("cpu").step(optimizer)
