"""Precisions: their classes, and the values that ``Trainer(precision=...)`` accepts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

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
"""Lowest CUDA compute capability that supports float8 matrix products."""


DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class TruePrecision(Precision):
    """Precisions ``64-true``, ``bf16-true`` and ``16-true``, in which all floating-point tensors have one dtype.

    These are the module's parameters and buffers, the floating-point tensors of each batch, and tensors that a step
    creates without a dtype (``torch.zeros(3)``). Under ``64-true`` complex tensors are complex128; under 16 bits, in
    which torch does not compute with complex numbers, they keep their dtype.

    Args:
        name: ``"64-true"``, ``"bf16-true"`` or ``"16-true"``.
        device_type: type of the device on which the steps run.

    Raises:
        MisconfigurationException: ``64-true`` on a device without float64.
    """

    def __init__(self, name: str, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self.name = name
        self.dtype = DTYPES[name]
        if self.dtype == torch.float64 and not has_float64(device_type):
            raise MisconfigurationException(
                f"precision={name!r} is not supported on {device_type!r} devices, which do not compute in float64. Use "
                "precision='32-true', or accelerator='cpu'"
            )
        self._complex = torch.complex128 if name == "64-true" else None
        self.convert_input = partial(tree_map, self._convert, leaf_types=Tensor)
        self.context = self.init_context = partial(DefaultDtype, self.dtype)

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert floating-point and complex parameters and buffers in place, and return the module."""
        with keeping_dtypes(module):
            if any(tensor.is_complex() for tensor in (*module.parameters(), *module.buffers())):
                return module._apply(self._convert)  # `module.to` would drop their imaginary parts
            return module.to(dtype=self.dtype)

    def _convert(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(self.dtype)
        return tensor.to(self._complex) if self._complex is not None and tensor.is_complex() else tensor


class DefaultDtype(AbstractContextManager[None]):
    """Context that sets the dtype of tensors created without a dtype (``torch.set_default_dtype``)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._before)


class MixedPrecision(Precision):
    """Precisions ``bf16-mixed`` and ``16-mixed``: steps run under ``torch.autocast``; ``16-mixed`` scales the loss.

    On a CPU ``16-mixed`` is slow; it is for trying a script that is meant for GPUs.

    Args:
        name: ``"bf16-mixed"`` or ``"16-mixed"``.
        device_type: type of the device on which the steps run.

    Raises:
        MisconfigurationException: torch has no such autocast on the device.
    """

    def __init__(self, name: str, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self.name = name
        self.autocast_dtype = torch.bfloat16 if name == "bf16-mixed" else torch.float16
        if not has_autocast(device_type, self.autocast_dtype):
            others = ("bf16-mixed", "16-mixed", "32-true")
            raise MisconfigurationException(
                f"precision={name!r} is not supported: torch has no autocast to {self.autocast_dtype} on "
                f"{device_type!r} devices. Use precision={' or '.join(repr(each) for each in others if each != name)}"
            )
        if name == "16-mixed":
            self.scaler = LossScaler(device_type)
        # Without autocast's cache of cast weights: a weight that is first cast under no_grad would come from the cache
        # without a graph in a training forward, and get no gradient.
        self.context = partial(torch.autocast, device_type, dtype=self.autocast_dtype, cache_enabled=False)


class Float8Precision(MixedPrecision):
    """Precision ``fp8-mixed``: like ``bf16-mixed``, but linear layers multiply in float8 with scale factors (torchao).

    Only layers whose sizes are multiples of 16 use float8. On a GPU each of these layers is compiled. On a
    CPU float8 is emulated, for trying a script that is meant for GPUs. To pass arguments, use an object:
    ``Trainer(plugins=[Float8Precision(scaling="rowwise")])``.

    Args:
        name: ``"fp8-mixed"``.
        device_type: type of the device on which the steps run; None: CUDA if there is a device, otherwise the CPU.
        scaling: ``"tensorwise"``, a scale for each tensor, or ``"rowwise"``, one for each row, which is more exact and
            slower.
        compiles: compile the layers on a GPU.

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
                f"precision={name!r} is not supported on {device_type!r} devices, only on CUDA devices and, emulated, "
                "on the CPU. Use precision='bf16-mixed'"
            )
        if device_type == "cuda" and torch.cuda.get_device_capability() < FLOAT8:
            have = ".".join(map(str, torch.cuda.get_device_capability()))
            raise MisconfigurationException(
                f"precision={name!r}: {torch.cuda.get_device_name()} has compute capability {have}, but float8 needs "
                "8.9 (Ada, Hopper and later). Use precision='bf16-mixed'"
            )
        if find_spec("torchao") is None:
            raise MisconfigurationException(
                f"precision={name!r} needs torchao, which is not installed. Run `pip install torchao`, or use "
                "precision='bf16-mixed'"
            )

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Replace the linear layers in place by torchao's, which keep the parameters. Return the module."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def is_supported(layer: torch.nn.Module, name: str) -> bool:
            # float8 matrix products require sizes that are multiples of 16
            return type(layer) is torch.nn.Linear and not (layer.in_features % 16 or layer.out_features % 16)

        is_compiled = has_compiled(module)
        config = replace(
            Float8LinearConfig.from_recipe_name(self.scaling), emulate=self.device_type == "cpu", pad_inner_dim=True
        )
        convert_to_float8_training(module, config=config, module_filter_fn=is_supported)
        # without compilation the casts take longer than float8 saves
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
"""Name -> function that creates the precision from (name, device type)."""

ALIASES = {"64": "64-true", "32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
"""Short names of precisions -> full names; numbers count as strings."""


def precision_name(flag: str | int | None) -> str:
    """Return the full name of a ``precision`` flag; None is ``32-true``.

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
            f"precision={flag!r} is not known. Use one of {', '.join(map(repr, PRECISIONS))}"
        )
    return name


def make_precision(flag: str | int | None, device_type: str = "cpu") -> Precision:
    """Create the precision for a ``Trainer(precision=...)`` value and a type of device.

    Args:
        flag: a name in `PRECISIONS`, a short one in `ALIASES`, or None.
        device_type: ``"cpu"``, ``"cuda"``, ``"mps"``.

    Raises:
        MisconfigurationException: the precision does not exist, or the device does not support it.
    """
    name = precision_name(flag)
    return PRECISIONS[name](name, device_type)
