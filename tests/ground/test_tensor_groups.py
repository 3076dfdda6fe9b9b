"""Groups of tensors that are copied or sent as one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lockstep.ground.comm import ALONE, grouped

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)


def drawn(seed: int) -> list[Tensor]:
    """Tensors of some dtypes and sizes, empty ones and large ones among them."""
    draw = random.Random(seed)
    sizes = (0, 1, 7, 1000, ALONE - 1, ALONE, 3 * ALONE)
    return [torch.empty(draw.choice(sizes) // dtype.itemsize, dtype=dtype) for dtype in draw.choices(DTYPES, k=30)]


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_of_one_kind_and_no_larger_than_asked(seed: int) -> None:
    tensors, most = drawn(seed), 3 * ALONE // 2
    groups = list(grouped(tensors, most))
    assert sorted(index for group in groups for index in group) == list(range(len(tensors)))
    for group in groups:
        assert group == sorted(group)
        assert len({tensors[index].dtype for index in group}) == 1
        size = sum(tensors[index].nbytes for index in group)
        assert size <= most if len(group) > 1 else True
        if any(tensors[index].nbytes >= ALONE for index in group):
            assert len(group) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_two_groups_of_small_tensors_would_have_been_one(seed: int) -> None:
    tensors, most = drawn(seed), 3 * ALONE // 2
    small: dict[torch.dtype, list[list[int]]] = {}
    for group in grouped(tensors, most):
        if tensors[group[0]].nbytes < ALONE:
            small.setdefault(tensors[group[0]].dtype, []).append(group)
    for groups in small.values():
        for first, second in pairwise(groups):
            assert sum(tensors[index].nbytes for index in first) + tensors[second[0]].nbytes > most
