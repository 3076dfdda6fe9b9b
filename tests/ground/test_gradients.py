"""Norms of gradients."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.ground.gradients import grad_norm


def module_with_gradients() -> torch.nn.Module:
    module = torch.nn.Linear(2, 1)
    module.weight.grad = torch.tensor([[3.0, -4.0]])
    module.bias.grad = torch.tensor([12.0])
    module.register_parameter("frozen", torch.nn.Parameter(torch.ones(1)))
    return module


@pytest.mark.parametrize(
    ("norm_type", "weight", "total"),
    [(2, 5.0, 13.0), (1.0, 7.0, 19.0), ("inf", 4.0, 12.0), (3, 91 ** (1 / 3), 1819 ** (1 / 3))],
)
def test_norms_of_each_and_of_all(norm_type: float | str, weight: float, total: float) -> None:
    norms = grad_norm(module_with_gradients(), norm_type, group_separator=".")
    p = float(norm_type)
    assert set(norms) == {f"grad_{p}_norm.weight", f"grad_{p}_norm.bias", f"grad_{p}_norm_total"}
    assert norms[f"grad_{p}_norm.weight"].item() == pytest.approx(weight)
    assert norms[f"grad_{p}_norm_total"].item() == pytest.approx(total)


def test_no_gradients_no_norms() -> None:
    assert grad_norm(torch.nn.Linear(1, 1), 2) == {}


@pytest.mark.parametrize("norm_type", [0, -1, math.nan])
def test_an_impossible_norm(norm_type: float) -> None:
    with pytest.raises(ValueError, match=r"norm_type=.*positive"):
        grad_norm(module_with_gradients(), norm_type)
