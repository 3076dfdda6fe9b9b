"""The hooks of a run, as tables of bound methods that hold only what somebody overrides.

Beside them the hooks on a batch's way to the device.
"""

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
"""Methods of callbacks, the module's own, and methods of callbacks that come behind it."""


def is_replaced(name: str, instance: object, base: type) -> bool:
    """Whether ``instance``, by its class or by itself, has another ``name`` than ``base``, which is to be called."""
    found = getattr(instance, name, None)
    return found is not None and getattr(found, "__func__", found) is not getattr(base, name, None)


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Return True if ``instance`` means something else by ``method_name`` than its base class.

    What goes around the base's own method (`functools.wraps`, `functools.partial`, ``Mock(wraps=...)``), as a helper
    puts it there that traces calls, means the same: it is called where it is called for (`is_replaced`), and no reason
    to refuse a module.

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
    found = getattr(instance, method_name, None)
    return found is not None and innermost(found) is not innermost(getattr(parent, method_name))


class CallbackMethod(partial[Any]):
    """A callback's method of a hook, with the Trainer and the module; it may be no bound method."""

    owner: Callback

    def __new__(cls, callback: Callback, name: str, trainer: Trainer, module: LightningModule) -> CallbackMethod:
        made = super().__new__(cls, by_position(callback, name), trainer, module)
        made.owner = callback
        return made


def by_position(owner: object, name: str) -> Method:
    """A method of a hook. That of `setup` and `teardown` is called by its argument's name, as Lightning does."""
    method: Method = getattr(owner, name)
    if name not in OF_SETUP or not _takes_stage(method):
        return method

    def with_stage(*arguments: object) -> Any:
        *others, stage = arguments
        return method(*others, stage=stage)

    return with_stage


def _takes_stage(method: Method) -> bool:
    """Whether a hook of set-up has its argument by Lightning's name, as it has to there."""
    try:
        inspect.signature(method).bind_partial(stage=None)
    except TypeError:
        return False
    return True


class Hooks:
    """For each hook the callbacks' methods and the module's own, or None where nobody overrides it.

    A step asks ``if hooks.on_before_backward is not None`` and pays nothing else. Callbacks come first, in
    the order of the list, then the module. Callbacks that save come behind the module in ``on_train_batch_end``: what
    it does there, to an average of its weights say, is of the batch that is saved.

    Args:
        trainer: what the callbacks' methods receive first.
        module: of the call.
        callbacks: of the call.
        results: where hooks log to, until the loop says otherwise.

    Attributes:
        epoch_end_monitors: callbacks that read metrics see ``on_train_epoch_end`` last, when the module has logged
            there, too.
        looked_again: called when what users have changed is called from then on.
    """

    on_train_epoch_end: Bound | None
    looked_again: Callable[[], None] | None
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Bound | None: ...

    def __init__(
        self, trainer: Trainer, module: LightningModule, callbacks: Sequence[Callback], results: LogCollector
    ) -> None:
        self.module, self.results = module, results
        self._trainer = trainer
        self.looked_again = None
        self._bind(callbacks)

    def look_again(self, callbacks: Sequence[Callback]) -> None:
        """Call from here on what users have by now: callbacks in the Trainer's list, hooks of the module's own."""
        if [*map(id, callbacks)] != [*map(id, self._callbacks)] or self._given_hooks() != self._given:
            self._bind(callbacks)
            if self.looked_again is not None:
                self.looked_again()

    def _given_hooks(self) -> dict[str, Any]:
        """The hooks that the module itself was given, and not its class."""
        given = vars(self.module)
        return {name: given[name] for name in NAMES if name in given}

    def _bind(self, callbacks: Sequence[Callback]) -> None:
        trainer, module = self._trainer, self.module
        self._callbacks, self._given = [*callbacks], self._given_hooks()

        def of_callbacks(name: str) -> tuple[CallbackMethod, ...]:
            own = (callback for callback in callbacks if is_replaced(name, callback, Callback))
            return tuple(CallbackMethod(callback, name, trainer, module) for callback in own)

        for name in NAMES:
            bound = of_callbacks(name)
            behind: tuple[CallbackMethod, ...] = ()
            if name == "on_train_batch_end":
                bound, behind = _split(bound, lambda callback: isinstance(callback, Checkpoint))
            own = by_position(module, name) if is_replaced(name, module, ModuleHooks) else None
            setattr(self, name, (bound, own, behind) if bound or behind or own is not None else None)
        self.epoch_end_monitors = self._split_monitors()
        self._of_any_rank = {name: of_callbacks(name) for name in ("_on_any_batch_start", "_on_any_batch_end")}

    def call_without_samples(self, name: str, batch_idx: int) -> None:
        """Let lockstep's own callbacks count a micro-batch for which this rank has no samples."""
        for method in self._of_any_rank[name]:
            method(batch_idx)

    def owners(self, names: tuple[str, ...]) -> list[str]:
        """The classes outside lockstep that override one of these hooks, as ``Class.hook``."""
        found = []
        everybody = [*((callback, Callback) for callback in self._callbacks), (self.module, ModuleHooks)]
        for name in names:
            for owner, base in everybody:
                if is_overridden(name, owner, base):
                    method = innermost(getattr(owner, name))
                    if not str(getattr(method, "__module__", "")).startswith("lockstep."):
                        found.append(f"{type(owner).__name__}.{name}")
        return found

    def _split_monitors(self) -> tuple[CallbackMethod, ...]:
        pair = self.on_train_epoch_end
        if pair is None:
            return ()
        bound, own, behind = pair
        others, monitors = _split(bound, lambda callback: callback._decides is True)
        self.on_train_epoch_end = (others, own, behind) if others or own else None
        return monitors

    def call(self, name: str, *args: object) -> Any:
        """Run a hook of everybody who overrides it; gives what the module's own returned."""
        pair = getattr(self, name)
        if pair is None:
            return None
        results = self.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        bound, own, behind = pair
        for method in bound:
            method(*args)
        returned = own(*args) if own is not None else None
        for method in behind:
            method(*args)
        results.hook, results.table = before, table
        return returned

    def callbacks(self, name: str) -> tuple[Method, ...]:
        """The callbacks' methods of a hook, without the module's."""
        pair = getattr(self, name)
        return () if pair is None else pair[0] + pair[2]

    def before_own(self, name: str) -> str:
        """The callback's method of this hook from which this is called, where the module's own comes behind it."""
        pair = getattr(self, name)
        if pair is None or pair[1] is None or self.results.hook[0] != name:
            return ""
        calls = [call for call in pair[0] if isinstance(call, CallbackMethod)]
        owners = {getattr(innermost(call.func), "__code__", None): call.owner for call in calls}
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code in owners:
                return f"{type(owners[frame.f_code]).__name__}.{name}"
            frame = frame.f_back
        return ""

    def own(self, name: str, *args: object) -> Any:
        """Run a hook that only the module has."""
        results = self.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        returned = getattr(self.module, name)(*args)
        results.hook, results.table = before, table
        return returned


def _split(
    methods: tuple[CallbackMethod, ...], belongs: Callable[[Callback], bool]
) -> tuple[tuple[CallbackMethod, ...], tuple[CallbackMethod, ...]]:
    """The methods of other callbacks, and of those that belong."""
    chosen = tuple(method for method in methods if belongs(method.owner))
    return tuple(method for method in methods if method not in chosen), chosen


# -- a batch's way to the device ------------------------------------------------------------------------------


OF_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Moves batches to the strategy's device through the hooks that the data module or the module overrides.

    Attributes:
        hooks: those that are called, by name.
        idle: whether a call would give back the batch as it is; the loops then do not call.
    """

    def __init__(self, module: LightningModule, datamodule: LightningDataModule | None, strategy: Strategy) -> None:
        self.hooks: dict[str, Method] = {}
        for name in OF_TRANSFER:
            if datamodule is not None and is_overridden(name, datamodule, LightningDataModule):
                self.hooks[name] = getattr(datamodule, name)
            elif is_replaced(name, module, ModuleHooks):
                self.hooks[name] = getattr(module, name)
        self._device = strategy.root_device
        if self._device.type != "cpu":
            self.hooks.setdefault("transfer_batch_to_device", module.transfer_batch_to_device)
        self._convert = strategy.precision.convert_input
        self.use(self.hooks)

    def use(self, hooks: Mapping[str, Method]) -> None:
        """Call these from here on."""
        before, move, after = map(hooks.get, OF_TRANSFER)
        moved = None if move is None else _with_device(move, self._device)
        converted = None if self._convert is None else _of_batch(self._convert)
        # a cast makes memory that is not pinned, which the copy would wait for; a hook of the user's sees the cast
        there = self._device.type != "cpu" and before is None
        order = (moved, converted, after) if there else (converted, before, moved, after)
        self._steps = [step for step in order if step is not None]
        self.idle = not self._steps

    def __call__(self, batch: object, dataloader_idx: int = 0) -> Any:
        """The batch on the device, in the run's precision."""
        for step in self._steps:
            batch = step(batch, dataloader_idx)
        return batch


def _with_device(move: Method, device: torch.device) -> Method:
    return lambda batch, dataloader_idx: move(batch, device, dataloader_idx)


def _of_batch(convert: Method) -> Method:
    return lambda batch, dataloader_idx: convert(batch)
