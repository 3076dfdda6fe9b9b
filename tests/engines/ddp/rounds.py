"""A round of a reducer, and the comparison of its gradients with those of one process."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.engines.ddp.reducer import Reducer


def reduced(reducer: Reducer, loss: Tensor, **options: Any) -> None:
    """Run a backward whose gradients the reducer averages."""
    reducer.prepare()
    loss.backward(**options)
    reducer.finish()


def assert_close(found: list[Any], expected: list[Any]) -> None:
    """Assert that gradients, by step, differ from others by rounding alone, and that the same ones are None."""
    for mine, right in zip(found, expected, strict=True):
        for grad, reference in zip(mine, right, strict=True):
            assert (grad is None) == (reference is None)
            if reference is not None and reference.numel():
                assert (grad - reference).abs().max() <= 1e-12 * reference.abs().max() + 1e-300
