"""One precision for parameters, inputs and arithmetic: 64 or 16 bits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.tree import tree_map
from lockstep.precision.base import Precision

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class TruePrecision(Precision):
    """``64-true``, ``bf16-true`` and ``16-true``: everything floating is of one dtype.

    The module's parameters and buffers, the floating tensors of each batch, and what a step makes without
    saying a dtype (``torch.zeros(3)``). Complex ones have parts of that dtype, where torch computes with such: under
    ``64-true`` they are complex128. Under 16 bits they stay what they are.

    Args:
        name: ``"64-true"``, ``"bf16-true"`` or ``"16-true"``.
        device_type: where the steps run.
    """

    def __init__(self, name: str, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self.name = name
        self.dtype = DTYPES[name]
        self._complex = torch.complex128 if name == "64-true" else None
        self.convert_input = self._convert_batch
        self.context = self._default_dtype

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with its floating and complex parameters and buffers in this precision, changed in place."""
        if any(tensor.is_complex() for tensor in (*module.parameters(), *module.buffers())):
            return module._apply(self._convert)  # `module.to` would leave no more of them than their real parts
        return module.to(dtype=self.dtype)

    def _convert(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(self.dtype)
        return tensor.to(self._complex) if self._complex is not None and tensor.is_complex() else tensor

    def _convert_batch(self, batch: Any) -> Any:
        return tree_map(self._convert, batch, Tensor)

    def _default_dtype(self) -> AbstractContextManager[None]:
        return DefaultDtype(self.dtype)


class DefaultDtype(AbstractContextManager[None]):
    """Inside, tensors that are made without a dtype are of this one (``torch.set_default_dtype``)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._before)
