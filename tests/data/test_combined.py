"""CombinedLoader: the four modes, in any nest, as Lightning has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.data.combined import CombinedLoader

LOADERS = {"a": DataLoader(range(6), batch_size=4), "b": DataLoader(range(15), batch_size=5)}


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


@pytest.mark.parametrize(
    ("mode", "second", "length"),
    [
        ("min_size", [[0, 1, 2, 3], [4, 5]], 2),
        ("max_size", [[0, 1, 2, 3], [4, 5], None], 3),
        ("max_size_cycle", [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]], 3),
    ],
)
def test_side_by_side(mode: Any, second: list[Any], length: int) -> None:
    combined = CombinedLoader(LOADERS, mode)
    for _ in range(2):
        items = list(combined)
        assert len(combined) == length
        assert [plain(batch)["a"] for batch, _, _ in items] == second
        assert [plain(batch)["b"] for batch, _, _ in items] == [list(range(5 * i, 5 * i + 5)) for i in range(length)]
        assert [(batch_idx, number) for _, batch_idx, number in items] == [(i, 0) for i in range(length)]


def test_one_after_the_other() -> None:
    combined = CombinedLoader(LOADERS, "sequential")
    assert len(combined) == 5
    assert [(index, number) for _, index, number in combined] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)]
    combined.limits = [1, 2]
    assert len(combined) == 3
    assert [(index, number) for _, index, number in combined] == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_of_no_loaders_there_is_no_batch(mode: Any) -> None:
    """It ended in the error of `min()`."""
    assert list(CombinedLoader([], mode)) == []
    assert len(CombinedLoader({}, mode)) == 0


def test_the_loaders_can_be_seen_and_exchanged() -> None:
    combined = CombinedLoader(LOADERS, "max_size")
    assert combined.flattened == list(LOADERS.values())
    assert combined.iterables is LOADERS
    assert combined.sampler["a"] is LOADERS["a"].sampler
    assert combined.batch_sampler["b"] is LOADERS["b"].batch_sampler
    combined.flattened = [range(1), range(2)]
    assert combined.iterables == {"a": range(1), "b": range(2)}
    assert combined.sampler == {"a": None, "b": None}
    with pytest.raises(ValueError, match="assigned 1 loaders, but it has 2"):
        combined.flattened = [range(1)]
    with pytest.raises(ValueError, match="3 numbers for 2 loaders"):
        combined.limits = [1, 2, 3]


@pytest.mark.timeout(60)
def test_reset_ends_persistent_workers() -> None:
    loader = DataLoader(range(6), num_workers=1, persistent_workers=True)
    combined = CombinedLoader([loader])
    next(iter(combined))
    assert loader._iterator is not None
    combined.reset()
    assert loader._iterator is None
