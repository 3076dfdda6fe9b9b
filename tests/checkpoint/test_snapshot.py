"""A snapshot is the checkpoint at one moment, in tensors of its own that share what the checkpoint's shared."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.io import snapshot


def file_of(checkpoint: Any) -> int:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.tell()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_changes_later_is_not_in_it(mode: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters())
    checkpoint = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "callbacks": {"c": {"best": [1.0, (torch.tensor(2.0), "x")], "seen": {1, 2}}},
    }
    expected = [value.tolist() for value in module.state_dict().values()]
    with mode():
        copied = snapshot(checkpoint)
    module(torch.randn(5, 2)).square().sum().backward()
    optimizer.step()
    checkpoint["callbacks"]["c"]["best"][1][0].add_(1)  # type: ignore[index]
    checkpoint["callbacks"]["c"]["seen"].add(3)  # type: ignore[index]
    assert [value.tolist() for value in copied["state_dict"].values()] == expected
    assert copied["callbacks"] == {"c": {"best": [1.0, (torch.tensor(2.0), "x")], "seen": {1, 2}}}
    assert copied["optimizer_states"][0]["state"] == {}
    assert type(copied["state_dict"]) is OrderedDict
    assert copied["state_dict"]._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]


def test_what_shares_memory_still_does() -> None:
    table = torch.randn(100, 10)
    tied = {"in": table, "out": table.t(), "row": table[3:5], "again": table, "list": [table[7]]}
    copied = snapshot(tied)
    assert file_of(copied) == file_of(tied)
    assert copied["in"] is copied["again"]
    assert copied["out"].stride() == (1, 10)
    for name in ("in", "out", "row"):
        assert torch.equal(copied[name], tied[name])  # type: ignore[arg-type]
    table.zero_()
    assert copied["row"].abs().sum() > 0
    copied["in"][7] = 5
    assert copied["list"][0].tolist() == [5] * 10


def test_tensors_of_every_kind() -> None:
    weight = nn.Parameter(torch.randn(3))
    named = torch.ones(2)
    named.note = "kept"  # type: ignore[attr-defined]
    kinds = {
        "parameter": weight,
        "frozen": nn.Parameter(torch.ones(1), requires_grad=False),
        "result": weight * 2,
        "complex": torch.randn(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3),
        "named": named,
    }
    expected = {name: value.detach().clone() for name, value in kinds.items()}
    copied = snapshot(kinds)
    with torch.no_grad():
        weight.zero_()
    for name, value in copied.items():
        assert type(value) is type(kinds[name]), name
        assert value.dtype == kinds[name].dtype, name
        assert torch.equal(value.to_dense(), expected[name].to_dense()), name
    assert copied["parameter"].requires_grad
    assert not copied["frozen"].requires_grad
    assert copied["named"].note == "kept"
