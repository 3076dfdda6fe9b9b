"""Search for the operation of a training step that first makes a value that is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.extensions.replay.operations import Operation, OperationWatch


class FirstNotFinite(OperationWatch):
    """Dispatch mode that finds the first operation whose result is not finite although its inputs are.

    An operation with an infinite constant, such as the ``masked_fill`` of an attention mask, does not count. An
    operation that turns infinite inputs into NaN does.

    Args:
        module: the user's module.

    Attributes:
        found: description of the operation, with its module and its line; "" if there is none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.found = ""

    def look(self, given: list[Any]) -> tuple[bool, bool]:
        """Return (True if all inputs are finite, True if one has NaN)."""
        tensors = [torch.as_tensor(each) for each in given if not self.found]
        return all(map(_is_finite, tensors)), any(map(_has_nan, tensors))

    def record(self, operation: Operation, given: tuple[bool, bool], outputs: list[Tensor]) -> None:
        """Keep the operation if it is the first that makes a value that is not finite."""
        were_finite, had_nan = given
        if self.found or all(map(_is_finite, outputs)):
            return
        makes_nan = any(map(_has_nan, outputs)) and not had_nan
        if makes_nan or were_finite:
            kind = "NaN" if any(map(_has_nan, outputs)) else "infinite values"
            name, _, place = str(operation).partition(" ")
            self.found = f"{name} makes {kind} {place}".rstrip()


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())


def _has_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(torch.isnan(tensor).any())


def not_finite_in(named: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor that is not finite, or ""."""
    return next((name for name, tensor in named.items() if not _is_finite(tensor)), "")
