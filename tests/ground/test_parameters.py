"""Norms of gradients; parameters that a module has under several names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.ground.parameters import find_shared_parameters, grad_norm, set_shared_parameters


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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3, bias=False))
        self.again = self.inner[0]
        self.inner[1].weight = self.embedding.weight


def test_shared_parameters_are_found_and_tied_again() -> None:
    model = Tied()
    shared = find_shared_parameters(model)
    assert shared == [
        ["embedding.weight", "inner.1.weight"],
        ["inner.0.weight", "again.weight"],
        ["inner.0.bias", "again.bias"],
    ]
    model.inner[1].weight = nn.Parameter(torch.zeros(3, 2))
    assert find_shared_parameters(model) == shared[1:]
    assert set_shared_parameters(model, shared) is model
    assert model.inner[1].weight is model.embedding.weight
