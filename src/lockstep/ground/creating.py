"""Where modules and tensors are made: on which device, of which dtype, and whether their memory is filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def creating(
    device: torch.device, dtype: torch.dtype | None = None, empty: bool = False, in_parts: bool = False
) -> Iterator[None]:
    """Within the block, modules and tensors are made on ``device``.

    Args:
        device: of what names none itself.
        dtype: of floating tensors that name none themselves; None: torch's default.
        empty: leave the memory of parameters as it is, where ``torch.nn.init`` would fill it; for weights that a
            checkpoint brings.
        in_parts: this rank will have parts of the module only: with ``empty`` it gets no memory at all (meta).
    """
    if empty and in_parts:
        device, empty = torch.device("meta"), False
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(device)
        if empty:
            stack.enter_context(_Uninitialized())
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        yield


class _Uninitialized(TorchFunctionMode):
    """Skips the functions of ``torch.nn.init``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
