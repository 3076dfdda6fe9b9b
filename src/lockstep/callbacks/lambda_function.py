"""LambdaCallback: a callback whose hooks are plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import WrongType

HOOKS = frozenset(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))
"""The names of all hooks of a callback."""


class LambdaCallback(Callback):
    """A callback whose hooks are functions, passed as keyword arguments with the names of the hooks.

    Args:
        **hooks: hook names of :class:`~lockstep.callbacks.base.Callback` with functions that take the hook's
            arguments, ``(trainer, pl_module, ...)``; None omits a hook.

    Raises:
        WrongType: no hook has that name.

    Example::

        LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.callback_metrics))
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise WrongType(
                    f"LambdaCallback({name}=...): a callback has no such hook. The hooks are "
                    f"{', '.join(sorted(HOOKS))}."
                )
            if function is not None:
                setattr(self, name, function)
