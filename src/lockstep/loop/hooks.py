"""The hooks of a run, as tables of bound methods that hold only what somebody overrides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.callbacks.checkpoint import Checkpoint
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.hooks import ModuleHooks
from lockstep.module import LightningModule

# Hooks that callbacks and modules share, by name; Hooks has an attribute for each.
NAMES = (
    "setup",
    "teardown",
    "on_fit_start",
    "on_fit_end",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_start",
    "on_test_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_start",
    "on_predict_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_exception",
    "on_save_checkpoint",
    "on_load_checkpoint",
)
Method = Callable[..., Any]


def is_overridden(name: str, instance: Any, base: type) -> bool:
    """Whether ``instance`` (by its class, or by an attribute of its own) has another ``name`` than ``base``."""
    found = getattr(instance, name, None)
    return found is not None and getattr(found, "__func__", found) is not getattr(base, name, None)


class Hooks:
    """For each hook the callbacks' methods and the module's own, or None where nobody overrides it.

    A step asks ``if hooks.on_before_backward is not None`` and pays nothing else. Callbacks come first, in
    the order of the list, then the module.
    """

    on_train_epoch_end: Any

    def __init__(self, trainer: Any, module: LightningModule, callbacks: list[Any]) -> None:
        self._trainer = trainer
        for name in NAMES:
            bound = tuple(
                partial(getattr(callback, name), trainer, module)
                for callback in callbacks
                if is_overridden(name, callback, Callback)
            )
            own = getattr(module, name) if is_overridden(name, module, ModuleHooks) else None
            setattr(self, name, (bound, own) if bound or own else None)
        self.epoch_end_monitors = self._split_monitors(callbacks)
        self._of_any_rank = {
            name: [
                partial(getattr(callback, name), trainer, module)
                for callback in callbacks
                if is_overridden(name, callback, Callback)
            ]
            for name in ("_on_any_batch_start", "_on_any_batch_end")
        }

    def call_without_samples(self, name: str, batch_idx: int) -> None:
        """Let lockstep's own callbacks count a micro-batch for which this rank has no samples."""
        for method in self._of_any_rank[name]:
            method(batch_idx)

    def owners(self, names: tuple[str, ...]) -> list[str]:
        """The classes outside lockstep that override one of these hooks, as ``Class.hook``."""
        found = []
        for name in names:
            bound, own = getattr(self, name) or ((), None)
            for method in [*(call.func for call in bound), own]:
                method = inspect.unwrap(method) if method is not None else None
                if method is not None and not method.__module__.startswith("lockstep."):
                    found.append(f"{type(method.__self__).__name__}.{name}")
        return found

    def _split_monitors(self, callbacks: list[Any]) -> tuple[Method, ...]:
        """Callbacks that read metrics see ``on_train_epoch_end`` last, when the module has logged there too."""
        pair = self.on_train_epoch_end
        if pair is None:
            return ()
        bound, own = pair
        monitors = tuple(
            call for call in bound if isinstance(getattr(call.func, "__self__", None), (EarlyStopping, Checkpoint))
        )
        others = tuple(call for call in bound if call not in monitors)
        self.on_train_epoch_end = (others, own) if others or own else None
        return monitors

    def call(self, name: str, *args: Any) -> Any:
        """Run a hook of everybody who overrides it; gives what the module's own returned."""
        pair = getattr(self, name)
        if pair is None:
            return None
        results = self._trainer.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        bound, own = pair
        for method in bound:
            method(*args)
        returned = own(*args) if own is not None else None
        results.hook, results.table = before, table
        return returned

    def callbacks(self, name: str) -> tuple[Method, ...]:
        """The callbacks' methods of a hook, without the module's."""
        pair = getattr(self, name)
        return () if pair is None else pair[0]

    def own(self, name: str, *args: Any) -> Any:
        """Run a hook that only the module has."""
        results = self._trainer.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        returned = getattr(self._trainer.lightning_module, name)(*args)
        results.hook, results.table = before, table
        return returned

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no hook {name!r}")
