"""The number formats of a run, and the table from the values of ``Trainer(precision=...)`` to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from lockstep.ground.device import has_autocast, has_float64, is_there
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import has_compiled
from lockstep.ground.parameters import keeping_dtypes
from lockstep.ground.tree import tree_map
from lockstep.precision.base import LossScaler, Precision

FLOAT8 = (8, 9)
"""The first compute capability that multiplies in float8."""


DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class TruePrecision(Precision):
    """``64-true``, ``bf16-true`` and ``16-true``: everything floating is of one dtype.

    The module's parameters and buffers, the floating tensors of each batch, and what a step makes without
    saying a dtype (``torch.zeros(3)``). Complex ones have parts of that dtype, where torch computes with such: under
    ``64-true`` they are complex128. Under 16 bits they stay what they are.

    Args:
        name: ``"64-true"``, ``"bf16-true"`` or ``"16-true"``.
        device_type: where the steps run.

    Raises:
        MisconfigurationException: ``64-true`` on a device without float64.
    """

    def __init__(self, name: str, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self.name = name
        self.dtype = DTYPES[name]
        if self.dtype == torch.float64 and not has_float64(device_type):
            raise MisconfigurationException(
                f"precision={name!r}: {device_type!r} devices do not compute in float64: use precision='32-true', or "
                "accelerator='cpu'"
            )
        self._complex = torch.complex128 if name == "64-true" else None
        self.convert_input = self._convert_batch
        self.context = self.init_context = self._default_dtype

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with its floating and complex parameters and buffers in this precision, changed in place."""
        with keeping_dtypes(module):
            if any(tensor.is_complex() for tensor in (*module.parameters(), *module.buffers())):
                return module._apply(self._convert)  # `module.to` would leave no more of them than their real parts
            return module.to(dtype=self.dtype)

    def _convert(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(self.dtype)
        return tensor.to(self._complex) if self._complex is not None and tensor.is_complex() else tensor

    def _convert_batch(self, batch: object) -> Any:
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


class MixedPrecision(Precision):
    """``bf16-mixed`` and ``16-mixed``: steps under ``torch.autocast``; the latter with a loss scale.

    On a CPU ``16-mixed`` is for trying a script that is meant for GPUs: it is slow.

    Args:
        name: ``"bf16-mixed"`` or ``"16-mixed"``.
        device_type: where the steps run.

    Raises:
        MisconfigurationException: torch has no such autocast on the devices.
    """

    def __init__(self, name: str, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self.name = name
        self.autocast_dtype = torch.bfloat16 if name == "bf16-mixed" else torch.float16
        if not has_autocast(device_type, self.autocast_dtype):
            others = ("bf16-mixed", "16-mixed", "32-true")
            raise MisconfigurationException(
                f"precision={name!r}: torch has no autocast to {str(self.autocast_dtype).removeprefix('torch.')} on "
                f"{device_type!r} devices: use precision={' or '.join(repr(each) for each in others if each != name)}"
            )
        if name == "16-mixed":
            self.scaler = LossScaler(device_type)
        self.context = self._autocast

    def _autocast(self) -> AbstractContextManager[Any]:
        # Without autocast's cache of cast weights: a weight cast first under no_grad would come out of the
        # cache without its graph in the forward that trains, and get no gradient.
        return torch.autocast(self.device_type, dtype=self.autocast_dtype, cache_enabled=False)


class Float8Precision(MixedPrecision):
    """``fp8-mixed``: as ``bf16-mixed``, but linear layers multiply in float8, with scales of their own (torchao).

    Layers whose sizes are multiples of 16 take part. Each of them is compiled on a GPU, since uncompiled the casts take
    longer than float8 wins. On a CPU it is emulated, to try a script that is meant for GPUs. In the place of the name
    stands an object where arguments are wanted: ``Trainer(plugins=[Float8Precision(scaling="rowwise")])``.

    Args:
        name: ``"fp8-mixed"``.
        device_type: where the steps run; None: on CUDA devices where there are any, else on the CPU.
        scaling: ``"tensorwise"``, a scale for each tensor, or ``"rowwise"``, one for each row, which is more exact and
            slower.
        compiles: whether the layers are compiled on a GPU.

    Raises:
        MisconfigurationException: torchao is not installed, or the GPU does not compute in float8.
    """

    def __init__(
        self,
        name: str = "fp8-mixed",
        device_type: str | None = None,
        *,
        scaling: str = "tensorwise",
        compiles: bool = True,
    ) -> None:
        if device_type is None:
            device_type = "cuda" if is_there("cuda") else "cpu"
        super().__init__("bf16-mixed", device_type)
        self.name, self.scaling, self.compiles = name, scaling, compiles
        if device_type not in ("cuda", "cpu"):
            raise MisconfigurationException(
                f"precision={name!r} on {device_type!r}: float8 is for CUDA devices, and for trials on the CPU; use "
                "precision='bf16-mixed'"
            )
        if device_type == "cuda" and torch.cuda.get_device_capability() < FLOAT8:
            have = ".".join(map(str, torch.cuda.get_device_capability()))
            raise MisconfigurationException(
                f"precision={name!r}: {torch.cuda.get_device_name()} has compute capability {have}, and float8 needs "
                "8.9 (Ada, Hopper and later); use precision='bf16-mixed'"
            )
        if find_spec("torchao") is None:
            raise MisconfigurationException(
                f"precision={name!r} needs torchao, which is not installed: pip install torchao; or use "
                "precision='bf16-mixed'"
            )

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with linear layers of torchao's, which have the same parameters, changed in place."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def takes_part(layer: torch.nn.Module, name: str) -> bool:
            return type(layer) is torch.nn.Linear and not (layer.in_features % 16 or layer.out_features % 16)

        is_compiled = has_compiled(module)
        config = replace(
            Float8LinearConfig.from_recipe_name(self.scaling), emulate=self.device_type == "cpu", pad_inner_dim=True
        )
        convert_to_float8_training(module, config=config, module_filter_fn=takes_part)
        if self.device_type != "cpu" and not is_compiled and self.compiles and has_triton():
            for layer in [layer for layer in module.modules() if type(layer).__name__ == "Float8Linear"]:
                layer.compile()
        return module


# -- the table -----------------------------------------------------------------------------------------------


PRECISIONS: dict[str, Callable[[str, str], Precision]] = {
    "64-true": TruePrecision,
    "32-true": lambda name, device_type: Precision(device_type),
    "bf16-mixed": MixedPrecision,
    "16-mixed": MixedPrecision,
    "bf16-true": TruePrecision,
    "16-true": TruePrecision,
    "fp8-mixed": Float8Precision,
}
"""Name to what makes it from (name, device type)."""

ALIASES = {"64": "64-true", "32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
"""Shorter spellings; numbers count as their text."""


def precision_name(flag: str | int | None) -> str:
    """The full name of a ``precision`` flag; None is ``32-true``.

    Raises:
        MisconfigurationException: there is no such precision.

    Example:
        >>> precision_name(64), precision_name("bf16")
        ('64-true', 'bf16-mixed')
    """
    name = "32-true" if flag is None else str(flag)
    name = ALIASES.get(name, name)
    if name not in PRECISIONS or isinstance(flag, bool):
        raise MisconfigurationException(
            f"precision={flag!r} is not known: use one of {', '.join(map(repr, PRECISIONS))}"
        )
    return name


def make_precision(flag: str | int | None, device_type: str = "cpu") -> Precision:
    """The precision that a flag stands for, on a type of device.

    Args:
        flag: a name in `PRECISIONS`, a short one in `ALIASES`, or None.
        device_type: ``"cpu"``, ``"cuda"``, ``"mps"``.

    Raises:
        MisconfigurationException: there is no such precision, or not on this device.
    """
    name = precision_name(flag)
    return PRECISIONS[name](name, device_type)
