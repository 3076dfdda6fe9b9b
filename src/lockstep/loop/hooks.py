"""Calls of the user's hooks: tables of the overridden methods, and the transfer of batches to the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.ground.methods import innermost
from lockstep.hooks import ModuleHooks
from lockstep.loop.logging import LogCollector
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

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
OF_SETUP = ("setup", "teardown")
Method = Callable[..., Any]
Bound = tuple[tuple[Any, ...], Method | None, tuple[Any, ...]]
"""(methods of callbacks, the module's method or None, methods of callbacks that run after the module)."""


def is_replaced(name: str, instance: object, base: type) -> bool:
    """Return True if the method ``name`` of ``instance`` differs from that of ``base``. Only such hooks are called."""
    found = getattr(instance, name, None)
    # a bound method is made at each access, so its function is compared
    return found is not None and getattr(found, "__func__", found) is not getattr(base, name, None)


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Return True if ``instance`` replaces ``method_name`` of its base class.

    A wrapper around the base's own method (`functools.wraps`, `functools.partial`, ``Mock(wraps=...)``), such as one
    that traces calls, does not count: it is called (`is_replaced`), but is no reason to refuse a module.

    Args:
        method_name: a method of ``parent``.
        instance: an object; for None the result is False.
        parent: the base class; None: LightningModule, LightningDataModule or Callback, whichever fits.

    Raises:
        ValueError: ``parent`` is None and no class fits, or the parent has no such method.
    """
    if instance is None:
        return False
    if parent is None:
        parent = next((k for k in (LightningModule, LightningDataModule, Callback) if isinstance(instance, k)), None)
    if parent is None:
        raise ValueError(
            f"is_overridden({method_name!r}, {type(instance).__name__}): pass its base class as `parent=`."
        )
    if not hasattr(parent, method_name):
        raise ValueError(f"is_overridden({method_name!r}, ...): {parent.__name__} has no such method.")
    found = getattr(instance, method_name, None)
    return found is not None and innermost(found) is not innermost(getattr(parent, method_name))


class CallbackMethod(partial[Any]):
    """Callable for a callback's hook that passes Trainer and module as first arguments. ``owner`` is the callback."""

    owner: Callback

    def __new__(cls, callback: Callback, name: str, trainer: Trainer, module: LightningModule) -> CallbackMethod:
        made = super().__new__(cls, by_position(callback, name), trainer, module)
        made.owner = callback
        return made


def by_position(owner: object, name: str) -> Method:
    """Return a hook that takes positional arguments. ``setup`` and ``teardown`` still get ``stage`` by keyword."""
    method: Method = getattr(owner, name)
    if name not in OF_SETUP:
        return method
    try:
        inspect.signature(method).bind_partial(stage=None)
    except TypeError:  # the user's hook has another name for its argument
        return method

    def with_stage(*arguments: object) -> Any:
        *others, stage = arguments
        return method(*others, stage=stage)

    return with_stage


class Hooks:
    """Table of hooks: one attribute per hook name, None if neither the module nor a callback overrides the hook.

    A step only checks ``if hooks.on_before_backward is not None``. Callbacks run first, in the order of the list, then
    the module.

    Args:
        trainer: first argument of the callbacks' methods.
        module: the module of the call.
        callbacks: the callbacks of the call.
        results: collector of the values that hooks log, until the loop replaces it.

    Attributes:
        epoch_end_monitors: methods of callbacks that read metrics: their ``on_train_epoch_end`` runs last, after the
            module has logged there.
        on_rebound: called after hooks that users have changed were bound again.
    """

    on_train_epoch_end: Bound | None
    on_rebound: Callable[[], None] | None
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Bound | None: ...

    def __init__(
        self, trainer: Trainer, module: LightningModule, callbacks: Sequence[Callback], results: LogCollector
    ) -> None:
        self.module, self.results = module, results
        self._trainer = trainer
        self.on_rebound = None
        self._bind(callbacks)

    def rebind(self, callbacks: Sequence[Callback]) -> None:
        """Rebuild the table if users changed the list of callbacks, or assigned a hook to the module object."""
        if [*map(id, callbacks)] != [*map(id, self._callbacks)] or self._given_hooks() != self._given:
            self._bind(callbacks)
            if self.on_rebound is not None:
                self.on_rebound()

    def _given_hooks(self) -> dict[str, Any]:
        """Return, by name, the hooks that users assigned to the module object instead of defining them in its class."""
        given = vars(self.module)
        return {name: given[name] for name in NAMES if name in given}

    def _bind(self, callbacks: Sequence[Callback]) -> None:
        trainer, module = self._trainer, self.module
        self._callbacks, self._given = [*callbacks], self._given_hooks()

        def of_callbacks(name: str) -> tuple[CallbackMethod, ...]:
            own = (callback for callback in callbacks if is_replaced(name, callback, Callback))
            return tuple(CallbackMethod(callback, name, trainer, module) for callback in own)

        for name in NAMES:
            before = of_callbacks(name)
            after: tuple[CallbackMethod, ...] = ()
            if name == "on_train_batch_end":
                # changes of the module in its own hook, such as to an average of its weights, belong to the batch that
                # is saved
                before, after = _split(before, lambda callback: isinstance(callback, Checkpoint))
            own = by_position(module, name) if is_replaced(name, module, ModuleHooks) else None
            setattr(self, name, (before, own, after) if before or after or own is not None else None)
        self.epoch_end_monitors: tuple[CallbackMethod, ...] = ()
        if self.on_train_epoch_end is not None:
            before, own, after = self.on_train_epoch_end
            before, self.epoch_end_monitors = _split(before, lambda callback: callback._decides is True)
            self.on_train_epoch_end = (before, own, after) if before or own else None
        self._of_any_rank = {name: of_callbacks(name) for name in ("_on_any_batch_start", "_on_any_batch_end")}

    def call_without_samples(self, name: str, batch_idx: int) -> None:
        """Notify lockstep's own callbacks of a micro-batch for which this rank has no samples."""
        for method in self._of_any_rank[name]:
            method(batch_idx)

    def owners(self, names: tuple[str, ...]) -> list[str]:
        """Return ``Class.hook`` for each user class that overrides one of the hooks ``names``."""
        found = []
        everybody = [*((callback, Callback) for callback in self._callbacks), (self.module, ModuleHooks)]
        for name in names:
            for owner, base in everybody:
                if is_overridden(name, owner, base):
                    method = innermost(getattr(owner, name))
                    if not str(getattr(method, "__module__", "")).startswith("lockstep."):
                        found.append(f"{type(owner).__name__}.{name}")
        return found

    def call(self, name: str, *args: object) -> Any:
        """Run a hook on callbacks and module; return the result of the module's own method."""
        pair = getattr(self, name)
        if pair is None:
            return None
        results = self.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        first, own, last = pair
        for method in first:
            method(*args)
        returned = own(*args) if own is not None else None
        for method in last:
            method(*args)
        results.hook, results.table = before, table  # a hook may be called within another one
        return returned

    def callbacks(self, name: str) -> tuple[Method, ...]:
        """Return the methods that callbacks define for a hook, without the module's method."""
        pair = getattr(self, name)
        return () if pair is None else pair[0] + pair[2]

    def before_own(self, name: str) -> str:
        """Return ``Class.hook`` of the callback that is running, if the module's own hook runs after it; else ""."""
        pair = getattr(self, name)
        if pair is None or pair[1] is None or self.results.hook[0] != name:
            return ""
        # the frames of the stack show the method, also through a callback's own helpers
        calls = [call for call in pair[0] if isinstance(call, CallbackMethod)]
        owners = {getattr(innermost(call.func), "__code__", None): call.owner for call in calls}
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code in owners:
                return f"{type(owners[frame.f_code]).__name__}.{name}"
            frame = frame.f_back
        return ""

    def own(self, name: str, *args: object) -> Any:
        """Run a hook that only modules define, and return its result."""
        results = self.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        returned = getattr(self.module, name)(*args)
        results.hook, results.table = before, table
        return returned


def _split(
    methods: tuple[CallbackMethod, ...], belongs: Callable[[Callback], bool]
) -> tuple[tuple[CallbackMethod, ...], tuple[CallbackMethod, ...]]:
    """Split methods into two tuples: those with ``belongs(callback)`` False, and those with True."""
    chosen = tuple(method for method in methods if belongs(method.owner))
    return tuple(method for method in methods if method not in chosen), chosen


# -- transfer of a batch to the device ------------------------------------------------------------------------


OF_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Callable that moves batches to the strategy's device, with the transfer hooks of the data module or the module.

    Attributes:
        hooks: the hooks that are called, by name.
        idle: True if a call would return the batch unchanged; the loops then skip it.
    """

    def __init__(self, module: LightningModule, datamodule: LightningDataModule | None, strategy: Strategy) -> None:
        self.hooks: dict[str, Method] = {}
        for name in OF_TRANSFER:
            if datamodule is not None and is_overridden(name, datamodule, LightningDataModule):
                self.hooks[name] = getattr(datamodule, name)
            elif is_replaced(name, module, ModuleHooks):
                self.hooks[name] = getattr(module, name)
        # on the CPU there is nothing to move, and an idle transfer is skipped
        self._device = strategy.root_device
        if self._device.type != "cpu":
            self.hooks.setdefault("transfer_batch_to_device", module.transfer_batch_to_device)
        self._convert = strategy.precision.convert_input
        self.use(self.hooks)

    def use(self, hooks: Mapping[str, Method]) -> None:
        """Replace the transfer hooks by ``hooks``, which maps names to methods."""
        before, move, after = map(hooks.get, OF_TRANSFER)
        moved = None if move is None else _with_device(move, self._device)
        converted = None if self._convert is None else _without_loader(self._convert)
        # a cast on the CPU allocates memory that is not pinned, for which the copy to the device would wait; but a hook
        # of the user before the transfer gets the cast batch
        casts_there = self._device.type != "cpu" and before is None
        order = (moved, converted, after) if casts_there else (converted, before, moved, after)
        self._steps = [step for step in order if step is not None]
        self.idle = not self._steps

    def __call__(self, batch: object, dataloader_idx: int = 0) -> Any:
        """Return the batch on the device, in the run's precision."""
        for step in self._steps:
            batch = step(batch, dataloader_idx)
        return batch


def _with_device(move: Method, device: torch.device) -> Method:
    return lambda batch, dataloader_idx: move(batch, device, dataloader_idx)


def _without_loader(convert: Method) -> Method:
    return lambda batch, dataloader_idx: convert(batch)
