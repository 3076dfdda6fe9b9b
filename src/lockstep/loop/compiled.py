"""Conversion of modules compiled by ``torch.compile`` to LightningModules that still run compiled."""

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
    """Return True if ``model`` is the result of ``torch.compile(module)``. Costs nothing if nothing was compiled."""
    dynamo = sys.modules.get("torch._dynamo")  # torch imports it at the first compilation
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def from_compiled(model: nn.Module) -> LightningModule:
    """Return the LightningModule inside of a compiled one, with its ``forward`` and steps compiled.

    The result of ``torch.compile(module)`` is not a LightningModule. ``trainer.fit`` and the other calls of the Trainer
    apply this function themselves.

    Args:
        model: result of ``torch.compile``; the module inside is changed in place.

    Raises:
        ValueError: ``model`` is not compiled, or not a LightningModule.
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
        # `log` is not part of the model, and tracing it into the loops takes the compiler a minute
        module.log = torch.compiler.disable(module.log)  # type: ignore[method-assign, no-untyped-call]
    return module


def to_uncompiled(model: nn.Module) -> LightningModule:
    """Return the LightningModule as it was before ``torch.compile``, changed in place.

    Args:
        model: result of ``torch.compile`` or :func:`from_compiled`.

    Raises:
        ValueError: ``model`` is not compiled, or not a LightningModule.
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
    """Return ``model``, or the LightningModule inside of it if it is compiled."""
    return from_compiled(model) if is_compiled(model) and isinstance(model._orig_mod, LightningModule) else model
