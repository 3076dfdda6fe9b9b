"""Whether a module is compiled, whole or in part: code that watches its layers or its graph then sees nothing."""

from __future__ import annotations

import torch
from torch import nn


def has_compiled(module: nn.Module) -> bool:
    """Whether a layer of a module is compiled, by ``torch.compile``, ``Module.compile`` or ``torch.jit``."""
    return any(
        isinstance(layer, torch.jit.ScriptModule)
        or getattr(layer, "_compiled_call_impl", None) is not None
        or type(layer).__name__ == "OptimizedModule"
        for layer in module.modules()
    )
