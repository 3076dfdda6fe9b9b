"""Whether a module, data module or callback overrides a method: the question as users ask it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.datamodule import LightningDataModule
from lockstep.loop import hooks
from lockstep.module import LightningModule


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Whether ``instance`` has another method of this name than its base class.

    Args:
        method_name: a method of ``parent``.
        instance: None has nothing overridden.
        parent: the base class; None: LightningModule, LightningDataModule or Callback, as the instance is one.

    Raises:
        ValueError: ``parent`` is None and the instance is none of them, or the parent has no such method.
    """
    if instance is None:
        return False
    if parent is None:
        parent = next((k for k in (LightningModule, LightningDataModule, Callback) if isinstance(instance, k)), None)
    if parent is None:
        raise ValueError(
            f"is_overridden({method_name!r}, {type(instance).__name__}): say by `parent=` which class is its base."
        )
    if not hasattr(parent, method_name):
        raise ValueError(f"is_overridden({method_name!r}, ...): {parent.__name__} has no such method.")
    return hooks.is_overridden(method_name, instance, parent)


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Whether a hook takes an argument.

    Args:
        hook_fx: the hook.
        param: name of the argument.
        explicit: only the name counts as taking it.
        min_args: unless ``explicit``, so many arguments count as taking it, whatever their names are.
    """
    parameters = inspect.signature(inspect.unwrap(hook_fx)).parameters
    named = [name for name in parameters if name != "self"]
    if param in named or explicit:
        return param in named
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    return takes_any or (min_args is not None and len(named) >= min_args)
