"""Has a script calculate in float64, where it says float32 or less: what differs then is no rounding."""

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
from torch.utils._pytree import tree_map

from lockstep.extensions.verify.watch import put

_SMALLER = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {"float", "half", "bfloat16"}
_READERS = {torch._utils.__file__, torch.storage.__file__, torch.serialization.__file__}
"""Files of torch that read tensors: the bytes there are of the type that they say."""
_FROM_OUTSIDE = {"tensor", "as_tensor", "from_numpy", "asarray", "frombuffer"}


def widened(value: Any) -> Any:
    """A value with float32 tensors, and smaller ones, as float64 ones."""
    if isinstance(value, Tensor) and value.dtype in _SMALLER and type(value) is Tensor:
        return value.double()
    if isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float16):
        return value.astype(np.float64)
    return value


def widened_tree(batch: Any) -> Any:
    """A batch with its tensors so."""
    return tree_map(widened, batch)


def widen_module(module: nn.Module) -> None:
    """Make parameters and buffers float64 in place: those of a module that was unpickled."""
    for tensor in (*module.parameters(), *module.buffers()):
        widen_in_place(tensor)


def widen_in_place(tensor: Tensor) -> None:
    """Make a tensor float64 that others refer to."""
    if tensor.dtype in _SMALLER and type(tensor.data) is Tensor:
        tensor.data = tensor.data.double()


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch's, with float64 wherever a smaller type is asked for."""
    name = getattr(function, "__name__", "")
    if name in _CASTS and args and isinstance(args[0], Tensor):
        return args[0].double()
    if any(map(_is_smaller, (*args, *kwargs.values()))):
        if name == "view" or sys._getframe(2).f_code.co_filename in _READERS:
            return function(*args, **kwargs)
        args = tuple(map(_larger, args))
        kwargs = {key: _larger(value) for key, value in kwargs.items()}
    result = function(*args, **kwargs)
    return widened(result) if name in _FROM_OUTSIDE else result


def _larger(value: Any) -> Any:
    return torch.float64 if _is_smaller(value) else value


def _is_smaller(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in _SMALLER


def enter() -> None:
    """Make float64 the default, and have neither autocast nor gradient scalers do anything."""
    torch.set_default_dtype(torch.float64)
    put(torch, "set_default_dtype", lambda d, /: None)
    from_numpy = torch.from_numpy
    put(torch, "from_numpy", lambda array: widened(from_numpy(array)))
    for kind in (torch.amp.autocast, torch.amp.GradScaler):
        _disable(kind)


def _disable(kind: type) -> None:
    made: Callable[..., None] = vars(kind)["__init__"]

    @functools.wraps(made)
    def disabled(self: object, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        vars(self)["_enabled"] = False
        if "_scale" in vars(self):
            vars(self)["_init_scale"] = 1.0

    put(kind, "__init__", disabled)
