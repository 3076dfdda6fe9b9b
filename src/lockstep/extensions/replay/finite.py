"""Search for the operation of a training step that first makes a value that is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.extensions.replay.operations import ModuleStack, line_of_forward, users_line
from lockstep.ground.tree import tree_leaves


class FirstNotFinite(TorchDispatchMode):
    """Dispatch mode that finds the first operation whose result is not finite although its inputs are.

    An operation with an infinite constant, such as the ``masked_fill`` of an attention mask, does not count. An
    operation that turns infinite inputs into NaN does.

    Attributes:
        found: description of the operation, with its module and its line; "" if there is none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.found = ""
        self._modules = ModuleStack(module)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the operations in the ``with`` block."""
        # anomaly mode stores the line of each forward operation, which its backward shows
        with self._modules.watching(), torch.autograd.set_detect_anomaly(True, check_nan=False), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look at its result until one was found."""
        result = func(*args, **(kwargs or {}))
        if self.found or "empty" in func.name():  # memory without values may hold anything
            return result
        outputs = [*tree_leaves(result, Tensor)]
        if all(map(_is_finite, outputs)):
            return result
        given = (args, kwargs or {})
        inputs = [*tree_leaves(given, Tensor)]
        constants = [*tree_leaves(given, float)]
        makes_nan = any(map(_has_nan, outputs)) and not any(map(_has_nan, inputs))
        is_cause = all(map(_is_finite, inputs)) and all(-float("inf") < value < float("inf") for value in constants)
        if makes_nan or is_cause:
            kind = "NaN" if any(map(_has_nan, outputs)) else "infinite values"
            self.found = f"{func.name().removeprefix('aten::').partition('.')[0]} makes {kind}{self._place()}"
        return result

    def _place(self) -> str:
        """Return the module and the user's line of the running operation."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return f" in the backward of {line_of_forward(node) or node.name()}"
        inside, line = self._modules.innermost, users_line()
        return (f" in {inside!r}" if inside else "") + (f", {line}" if line else "")


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())


def _has_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(torch.isnan(tensor).any())


def not_finite_in(named: dict[str, Tensor]) -> str:
    """Return the name of the first tensor that is not finite, or ""."""
    return next((name for name, tensor in named.items() if not _is_finite(tensor)), "")
