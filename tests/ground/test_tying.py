"""Parameters under several names."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.ground.tying import find_shared_parameters, set_shared_parameters


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


def test_nothing_is_shared() -> None:
    assert find_shared_parameters(nn.Linear(2, 2)) == []
