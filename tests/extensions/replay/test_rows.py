"""Single samples of collated batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from lockstep.extensions.replay.rows import NoRows, take


class Pair(NamedTuple):
    inputs: torch.Tensor
    names: list[str]


X = torch.arange(12).reshape(3, 4)


@pytest.mark.parametrize(
    ("batch", "one"),
    [
        (X, X[[1]]),
        ([X, X[:, 0]], [X[[1]], X[[1], 0]]),
        ({"x": X, "names": ["a", "b", "c"], "scale": 2.0}, {"x": X[[1]], "names": ["b"], "scale": 2.0}),
        (Pair(X, ["a", "b", "c"]), Pair(X[[1]], ["b"])),
        # images of several sizes with a dict for each, as for detection
        (
            ([X[:1], X[:2], X], [{"box": X[:1]}, {"box": X[:2]}, {"box": X[:0]}]),
            ([X[:2]], [{"box": X[:2]}]),
        ),
        # three tensors of three samples are no list of samples
        ((X, X, X), (X[[1]], X[[1]], X[[1]])),
        ({"x": X, "weights": torch.ones(5)}, {"x": X[[1]], "weights": torch.ones(5)}),
    ],
)
def test_one_sample(batch: Any, one: Any) -> None:
    assert str(take(batch, [1], 3)) == str(one)


def test_a_batch_without_rows() -> None:
    with pytest.raises(NoRows, match="3 items"):
        take({"graph": torch.zeros(7, 2)}, [0], 3)
