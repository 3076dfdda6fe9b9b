"""Conversion of a script's smaller dtypes to float64, so that remaining differences are not rounding errors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.serialization
import torch.storage
from torch import Tensor, nn

from lockstep.extensions.verify.watch import patch

_SMALLER = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {"float", "half", "bfloat16"}
_READERS = {torch._utils.__file__, torch.storage.__file__, torch.serialization.__file__}
"""Files of torch that read tensors from bytes, where a dtype argument must not be changed."""
_FROM_OUTSIDE = {"tensor", "as_tensor", "from_numpy", "asarray", "frombuffer"}


def widen(value: Any) -> Any:
    """Return tensors and arrays of float32 or smaller dtypes as float64, and any other value unchanged."""
    if isinstance(value, Tensor) and value.dtype in _SMALLER and type(value) is Tensor:
        return value.double()
    if isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float16):
        return value.astype(np.float64)
    return value


def widen_module(module: nn.Module) -> None:
    """Convert a module's parameters and buffers to float64 in place, because unpickling has restored smaller dtypes."""
    for tensor in (*module.parameters(), *module.buffers()):
        widen_in_place(tensor)


def widen_in_place(tensor: Tensor) -> None:
    """Convert a tensor to float64 in place, so that all references see the conversion."""
    if tensor.dtype in _SMALLER and type(tensor.data) is Tensor:
        tensor.data = tensor.data.double()


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function after replacing each dtype smaller than float64 among its arguments by float64."""
    name = getattr(function, "__name__", "")
    if name in _CASTS and args and isinstance(args[0], Tensor):
        return args[0].double()
    if any(map(_is_smaller, (*args, *kwargs.values()))):
        # view(dtype) reinterprets bytes
        if name == "view" or sys._getframe(2).f_code.co_filename in _READERS:
            return function(*args, **kwargs)
        args = tuple(torch.float64 if _is_smaller(value) else value for value in args)
        kwargs = {key: torch.float64 if _is_smaller(value) else value for key, value in kwargs.items()}
    result = function(*args, **kwargs)
    # these take the type of their input, not the default one
    return widen(result) if name in _FROM_OUTSIDE else result


def _is_smaller(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in _SMALLER


def enter() -> None:
    """Make float64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    patch(torch, "FloatTensor", torch.DoubleTensor)
    patch(torch, "set_default_dtype", lambda d, /: None)
    from_numpy = torch.from_numpy
    # the mode of functions.py does not see this function
    patch(torch, "from_numpy", lambda array: widen(from_numpy(array)))


def disable_autocast() -> None:
    """Disable autocast and gradient scalers, also where a script keeps its own precision: their rounding is larger."""
    for kind in (torch.amp.autocast, torch.amp.GradScaler):
        original: Callable[..., None] = vars(kind)["__init__"]

        @functools.wraps(original)
        def init(self: object, *args: Any, original: Callable[..., None] = original, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            vars(self)["_enabled"] = False
            if "_scale" in vars(self):
                vars(self)["_init_scale"] = 1.0

        patch(kind, "__init__", init)
