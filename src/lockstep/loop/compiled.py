"""What ``torch.compile`` makes of a LightningModule, as a LightningModule that still runs compiled."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from lockstep.loop.hooks import is_overridden
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from torch._dynamo.eval_frame import OptimizedModule

COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def is_compiled(model: object) -> TypeGuard[OptimizedModule]:
    """Whether ``model`` is what ``torch.compile(module)`` gave; costs nothing where nobody compiles."""
    dynamo = sys.modules.get("torch._dynamo")  # torch imports it when something is compiled
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def from_compiled(model: nn.Module) -> LightningModule:
    """The LightningModule inside of a compiled one, its ``forward`` and steps compiled.

    ``torch.compile(module)`` is no LightningModule. ``trainer.fit`` and its like call this by themselves.

    Args:
        model: what ``torch.compile`` gave; the module inside is changed in place.

    Raises:
        ValueError: it is not compiled, or no LightningModule.
    """
    if not is_compiled(model):
        raise ValueError(f"from_compiled({type(model).__name__}): give what torch.compile(module) returned.")
    module = model._orig_mod
    if not isinstance(module, LightningModule):
        raise ValueError(f"from_compiled: a {type(module).__name__} was compiled, which is no LightningModule.")
    if module._compiler_ctx is None:
        module._compiler_ctx = {"dynamo_ctx": model.dynamo_ctx}
        for name in COMPILED:
            if is_overridden(name, module, LightningModule):
                setattr(module, name, model.dynamo_ctx(getattr(module, name)))
        # what `log` does is none of the model's, and following it into the loops takes the compiler a minute
        module.log = torch.compiler.disable(module.log)  # type: ignore[method-assign, no-untyped-call]
    return module


def to_uncompiled(model: nn.Module) -> LightningModule:
    """The LightningModule as it was before ``torch.compile``, changed in place.

    Args:
        model: what ``torch.compile`` or :func:`from_compiled` gave.

    Raises:
        ValueError: it is not compiled, or no LightningModule.
    """
    module = model._orig_mod if is_compiled(model) else model
    if not isinstance(module, LightningModule):
        raise ValueError(f"to_uncompiled: {type(module).__name__} is no LightningModule.")
    if module._compiler_ctx is None and module is model:
        raise ValueError(f"to_uncompiled({type(module).__name__}): this module is not compiled.")
    for name in (*COMPILED, "log") if module._compiler_ctx is not None else ():
        vars(module).pop(name, None)
    module._compiler_ctx = None
    return module


def unwrapped(model: object) -> object:
    """``model``, or the LightningModule inside of it where it is compiled."""
    return from_compiled(model) if is_compiled(model) and isinstance(model._orig_mod, LightningModule) else model
