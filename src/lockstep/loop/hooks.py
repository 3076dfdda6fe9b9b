"""The hooks of a run, as tables of bound methods that hold only what somebody overrides.

Beside them: hooks of earlier versions, and the hooks on a batch's way to the device.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.callbacks.base import Callback
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.overrides import innermost
from lockstep.ground.rank import rank_zero_deprecation, warn_once
from lockstep.ground.types import TrainerFn
from lockstep.hooks import ModuleHooks
from lockstep.loop.logging import LogCollector
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

# -- hooks of earlier versions -------------------------------------------------------------------------------


EPOCH_ENDS = {
    TrainerFn.FITTING: ("training_epoch_end", "validation_epoch_end"),
    TrainerFn.VALIDATING: ("validation_epoch_end",),
    TrainerFn.TESTING: ("test_epoch_end",),
}
NEW_NAMES = {"training_epoch_end": "on_train_epoch_end"}

# Called by versions before 2.0, and by nobody today: what to write instead.
FORGOTTEN = {
    "training_step_end": "the end of training_step",
    "validation_step_end": "the end of validation_step",
    "test_step_end": "the end of test_step",
    "predict_epoch_end": "on_predict_epoch_end",
    "training_end": "on_train_epoch_end",
    "validation_end": "on_validation_epoch_end",
    "test_end": "on_test_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "tng_dataloader": "train_dataloader",
}


OF_CALLBACKS = {
    **{name: FORGOTTEN[name] for name in ("on_epoch_start", "on_epoch_end", "on_batch_start", "on_batch_end")},
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception",
}

_OVERRIDE_RUN = "override `run(fn, *args)`, which calls each step"
_OVERRIDE_BACKWARD = "override `backward(loss, *args, **kwargs)`"
_CALLBACK = "use a Callback, whose hook of this name is called"
_OVERRIDE_SETUP = "override `setup_module(module, own_backward)`"

# Methods of Lightning's strategies and precisions that lockstep's do not have: what to write instead.
OF_STRATEGIES = {
    "optimizer_step": "override `step(optimizer, closure=None, **options)`",
    **dict.fromkeys(("training_step", "validation_step", "test_step", "predict_step"), _OVERRIDE_RUN),
    **dict.fromkeys(("pre_backward", "post_backward"), _OVERRIDE_BACKWARD),
    "post_training_step": _OVERRIDE_RUN,
    "batch_to_device": "override `transfer_batch_to_device` in the LightningModule",
    **dict.fromkeys(("setup", "model_to_device", "configure_ddp"), _OVERRIDE_SETUP),
    **dict.fromkeys(("setup_distributed", "set_world_ranks"), "override `setup_environment()`"),
    "determine_ddp_device_ids": "give Trainer(devices=[...])",
    "setup_precision_plugin": "give Trainer(precision=...), or a Precision in plugins=[...]",
    "process_dataloader": "return the loader as it shall be from `train_dataloader`",
    "distributed_sampler_kwargs": (  # unless they say what holds anyway
        "lockstep shares the data out by itself; with Trainer(use_distributed_sampler=False) you do"
    ),
    **dict.fromkeys(
        ("tensor_init_context", "model_sharded_context"), "make the layers in the module's configure_model"
    ),
    "lightning_module_state_dict": "override `save(alone, weights_only)`",
    "load_model_state_dict": "override `load(state)`, or `load_state_dict` in the LightningModule",
    "optimizer_state": "override `save(alone, weights_only)`",
    "load_optimizer_state_dict": "override `load_state_dict` in the optimizer",
    "on_train_batch_start": _CALLBACK,
    "on_exception": _CALLBACK,
    **{f"on_{name}_{at}": _CALLBACK for name in ("train", "validation", "test", "predict") for at in ("start", "end")},
}
_STEPS = ("forward", "train_step", "val_step", "test_step", "predict_step")
OF_PRECISIONS = {
    **{f"{step}_context": "give it as `context`, which is around every step" for step in _STEPS},
    **dict.fromkeys(("backward", "pre_backward", "post_backward"), "override `backward` in the LightningModule"),
    **dict.fromkeys(("optimizer_step", "unscale_gradients"), "override `optimizer_step` in the LightningModule"),
    **dict.fromkeys(
        ("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value"),
        "override `configure_gradient_clipping` in the LightningModule",
    ),
    "convert_output": "convert what the step returns in the step",
    "main_params": "override `configure_gradient_clipping` in the LightningModule",
    **dict.fromkeys(("module_init_context", "tensor_init_context"), "override `convert_module(module)`"),
    "connect": "override `convert_module(module)`",
    "on_save_checkpoint": "override `state_dict()`",
    "on_load_checkpoint": "override `load_state_dict(state)`",
    "teardown": "use a Callback",
}

SAMPLER = "distributed_sampler_kwargs"

CLOSE = 0.87
"""How like a hook's name another one that begins with ``on_`` must be to be taken for a misspelt one."""


def check_uncalled(
    strategy: Strategy, callbacks: Sequence[Callback], module: LightningModule, datamodule: LightningDataModule | None
) -> None:
    """Refuse a strategy or precision whose overrides nobody would call; tell of hooks that nobody knows.

    Raises:
        MisconfigurationException: with the first such method, and what to write instead.
    """
    uncalled = dict(OF_STRATEGIES)
    each_rank = {"num_replicas": strategy.replicas.count, "rank": strategy.replicas.index}
    if getattr(strategy, SAMPLER, None) == each_rank:  # which is what lockstep does
        del uncalled[SAMPLER]
    _refuse_overrides(strategy, uncalled, "Strategy")
    _refuse_overrides(strategy.precision, OF_PRECISIONS, "Precision")
    for callback in callbacks:
        old = [name for name in _written(callback) if name in OF_CALLBACKS]
        if old:
            instead = ", ".join(f"{name} ({OF_CALLBACKS[name]})" for name in old)
            warn_once(
                f"{type(callback).__name__} has hooks of old that nobody calls; in brackets what is called today: "
                f"{instead}."
            )
        _tell_misspelt(callback, Callback, OF_CALLBACKS)
    _tell_misspelt(module, ModuleHooks, FORGOTTEN)
    if datamodule is not None:
        _tell_misspelt(datamodule, LightningDataModule, ())


def _written(owner: object) -> Iterator[str]:
    """Names that the classes of an object define, those of lockstep and torch left out."""
    for kind in type(owner).__mro__:
        if kind.__module__.partition(".")[0] not in ("lockstep", "torch", "builtins", "abc", "typing"):
            yield from vars(kind)


def _refuse_overrides(owner: object, instead: Mapping[str, str], base: str) -> None:
    name = next((name for name in _written(owner) if name in instead), None)
    if name is not None:
        raise MisconfigurationException(
            f"{type(owner).__name__}.{name}: a {base} of lockstep has no such method, and nobody would call it. "
            f"Instead: {instead[name]}."
        )


def _tell_misspelt(owner: object, base: type, known: Iterable[str]) -> None:
    hooks = [name for name in dir(base) if name.startswith("on_")]
    for name in _written(owner):
        if name.startswith("on_") and not hasattr(base, name) and name not in known:
            meant = difflib.get_close_matches(name, hooks, 1, CLOSE)
            if meant:
                warn_once(f"{type(owner).__name__}.{name} is no hook, and the Trainer does not call it: {meant[0]}?")


def check_removed_hooks(module: LightningModule, fn: TrainerFn) -> None:
    """Refuse a module whose results would silently be missing.

    Raises:
        NotImplementedError: it has an ``*_epoch_end`` that takes outputs, which no Trainer has called since 2.0.
        MisconfigurationException: it overrides both names of ``configure_model``.
    """
    kind = type(module).__name__
    for name in EPOCH_ENDS.get(fn, ()):
        if callable(getattr(module, name, None)):
            new = NEW_NAMES.get(name, f"on_{name}")
            raise NotImplementedError(
                f"{kind}.{name}: this hook was removed in Lightning 2.0, and nobody calls it. Rename it to "
                f"`{new}(self)`, and collect what it needs in an attribute of the module, by "
                "`self.outputs.append(...)` in the step."
            )
    forgotten = [name for name in FORGOTTEN if callable(getattr(module, name, None))]
    if forgotten:
        instead = ", ".join(f"{name} ({FORGOTTEN[name]})" for name in forgotten)
        warn_once(f"{kind} has hooks of old that nobody calls; in brackets what is called today: {instead}.")
    if is_overridden("configure_sharded_model", module, ModuleHooks):
        if is_overridden("configure_model", module, ModuleHooks):
            raise MisconfigurationException(
                f"{kind} overrides configure_model and configure_sharded_model, its old name: keep configure_model."
            )
        rank_zero_deprecation(f"{kind}.configure_sharded_model: rename it to configure_model, its name of today.")


# -- the hooks of a run --------------------------------------------------------------------------------------


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
Bound = tuple[tuple[Any, ...], Method | None]  # (methods of callbacks, the module's own)


def is_replaced(name: str, instance: object, base: type) -> bool:
    """Whether ``instance``, by its class or by itself, has another ``name`` than ``base``, which is to be called."""
    found = getattr(instance, name, None)
    return found is not None and getattr(found, "__func__", found) is not getattr(base, name, None)


def is_overridden(name: str, instance: object, base: type) -> bool:
    """Whether ``instance`` means something else by ``name`` than ``base``.

    What goes around the base's own method (`functools.wraps`, `functools.partial`, ``Mock(wraps=...)``), as a helper
    puts it there that traces calls, means the same: it is called where it is called for (`is_replaced`), and no reason
    to refuse a module.
    """
    found = getattr(instance, name, None)
    return found is not None and innermost(found) is not innermost(getattr(base, name, None))


class _CallbackMethod(partial[Any]):
    """A callback's method of a hook, with the Trainer and the module; it may be no bound method."""

    owner: Callback

    def __new__(cls, callback: Callback, name: str, trainer: Trainer, module: LightningModule) -> _CallbackMethod:
        made = super().__new__(cls, getattr(callback, name), trainer, module)
        made.owner = callback
        return made


def owner_of(call: Method) -> Callback | None:
    """The callback whose method this is, in a table of hooks."""
    return getattr(call, "owner", None)


def _takes_stage(method: Method) -> bool:
    """Whether a hook of set-up has its argument by Lightning's name, as it has to there."""
    parameters = inspect.signature(method).parameters
    named = parameters.get("stage")
    if named is not None:
        return named.kind is not named.POSITIONAL_ONLY
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class Hooks:
    """For each hook the callbacks' methods and the module's own, or None where nobody overrides it.

    A step asks ``if hooks.on_before_backward is not None`` and pays nothing else. Callbacks come first, in
    the order of the list, then the module.

    Args:
        trainer: what the callbacks' methods receive first.
        module: of the call.
        callbacks: of the call.
        results: where hooks log to, until the loop says otherwise.

    Attributes:
        epoch_end_monitors: callbacks that read metrics see ``on_train_epoch_end`` last, when the module has logged
            there, too.
    """

    on_train_epoch_end: Bound | None
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Bound | None: ...

    def __init__(
        self, trainer: Trainer, module: LightningModule, callbacks: Sequence[Callback], results: LogCollector
    ) -> None:
        self.module, self.results = module, results

        self._callbacks = callbacks

        def of_callbacks(name: str) -> tuple[Method, ...]:
            own = (callback for callback in callbacks if is_replaced(name, callback, Callback))
            return tuple(_CallbackMethod(callback, name, trainer, module) for callback in own)

        for name in NAMES:
            bound = of_callbacks(name)
            own = getattr(module, name) if is_replaced(name, module, ModuleHooks) else None
            setattr(self, name, (bound, own) if bound or own is not None else None)
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

    def _split_monitors(self) -> tuple[Method, ...]:
        pair = self.on_train_epoch_end
        if pair is None:
            return ()
        bound, own = pair
        monitors = tuple(call for call in bound if getattr(owner_of(call), "_decides", False))
        others = tuple(call for call in bound if call not in monitors)
        self.on_train_epoch_end = (others, own) if others or own else None
        return monitors

    def call(self, name: str, *args: object) -> Any:
        """Run a hook of everybody who overrides it; gives what the module's own returned."""
        pair = getattr(self, name)
        if pair is None:
            return None
        results = self.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        bound, own = pair
        for method in bound:
            method(*args)
        returned = own(*args) if own is not None else None
        results.hook, results.table = before, table
        return returned

    def call_for(self, name: str, stage: TrainerFn) -> None:
        """Run ``setup`` or ``teardown``, whose argument goes by its name, ``stage``, as in Lightning."""
        pair = getattr(self, name)
        if pair is None:
            return
        results = self.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        for method in [*pair[0], *([] if pair[1] is None else [pair[1]])]:
            if _takes_stage(method):
                method(stage=stage)
            else:
                method(stage)
        results.hook, results.table = before, table

    def callbacks(self, name: str) -> tuple[Method, ...]:
        """The callbacks' methods of a hook, without the module's."""
        pair = getattr(self, name)
        return () if pair is None else pair[0]

    def own(self, name: str, *args: object) -> Any:
        """Run a hook that only the module has."""
        results = self.results
        before, table = results.hook, results.table
        results.enter(name, before[1])
        returned = getattr(self.module, name)(*args)
        results.hook, results.table = before, table
        return returned


# -- a batch's way to the device ------------------------------------------------------------------------------


OF_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Moves batches to the strategy's device through the hooks that the data module or the module overrides.

    Attributes:
        idle: whether a call would give back the batch as it is; the loops then do not call.
    """

    def __init__(self, module: LightningModule, datamodule: LightningDataModule | None, strategy: Strategy) -> None:
        chosen = {}
        for name in OF_TRANSFER:
            if datamodule is not None and is_overridden(name, datamodule, LightningDataModule):
                chosen[name] = getattr(datamodule, name)
            elif is_replaced(name, module, ModuleHooks):
                chosen[name] = getattr(module, name)
        self._before = chosen.get(OF_TRANSFER[0])
        self._after = chosen.get(OF_TRANSFER[2])
        self._device = strategy.root_device
        self._move = chosen.get(OF_TRANSFER[1])
        if self._move is None and self._device.type != "cpu":
            self._move = module.transfer_batch_to_device
        self._convert = strategy.precision.convert_input
        # a cast makes memory that is not pinned, which the copy would wait for; a hook of the user's sees the cast
        self._converts_there = self._device.type != "cpu" and self._before is None
        self.idle = not chosen and self._move is None and self._convert is None

    def __call__(self, batch: object, dataloader_idx: int = 0) -> Any:
        """The batch on the device, in the run's precision."""
        if self._convert is not None and not self._converts_there:
            batch = self._convert(batch)
        if self._before is not None:
            batch = self._before(batch, dataloader_idx)
        if self._move is not None:
            batch = self._move(batch, self._device, dataloader_idx)
        if self._convert is not None and self._converts_there:
            batch = self._convert(batch)
        if self._after is not None:
            batch = self._after(batch, dataloader_idx)
        return batch
