"""Numbers and tensors that are searched for NaN."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.ground.numbers import names_not_finite, parts_with_values


def test_the_padding_of_a_part_of_deepspeeds_is_not_searched() -> None:
    """A resume on three ranks was refused now and then: the last rank's part ends with memory that nobody writes."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_tensor = torch.tensor([1.0, 2.0, float("nan")])  # type: ignore[attr-defined]
    parameter.ds_shape = torch.Size([2])  # type: ignore[attr-defined]
    parts = parts_with_values([("bias", parameter)])
    assert [part.tolist() for _, part in parts] == [[1.0, 2.0]]
    parameter.ds_tensor[1] = float("inf")  # type: ignore[attr-defined]
    assert names_not_finite(parts) == ["bias"]
