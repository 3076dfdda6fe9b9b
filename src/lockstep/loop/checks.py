"""Checks of the user's module, data module, callbacks and strategy before a Trainer call starts.

A method that lockstep would never call causes an error or a warning, which shows what to write instead: former hooks,
overrides of methods that a base class does not have, misspelt hooks. Callbacks that cannot work, and steps whose
arguments do not fit their calls, are reported as well.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_deprecation, warn_once
from lockstep.ground.types import TrainerFn
from lockstep.hooks import ModuleHooks
from lockstep.loop.hooks import is_overridden
from lockstep.loop.session import Session
from lockstep.module import LightningModule
from lockstep.names.table import former_methods

_OF_VALIDATION = {"validation_epoch_end": "on_validation_epoch_end"}
EPOCH_ENDS = {
    TrainerFn.FITTING: {"training_epoch_end": "on_train_epoch_end", **_OF_VALIDATION},
    TrainerFn.VALIDATING: _OF_VALIDATION,
    TrainerFn.TESTING: {"test_epoch_end": "on_test_epoch_end"},
}
"""Removed hooks that took the outputs of all batches, and their current names, for each Trainer call."""
SAMPLER = "distributed_sampler_kwargs"
CLOSE = 0.87
"""Minimum similarity to a hook (difflib's ratio) at which a name starting with ``on_`` counts as misspelt."""


def check_uncalled(
    strategy: Strategy, callbacks: Sequence[Callback], module: LightningModule, datamodule: LightningDataModule | None
) -> None:
    """Raise if a strategy or precision overrides methods that lockstep never calls; warn about unknown hooks.

    Raises:
        MisconfigurationException: names the first such method, and what to write instead.
    """
    uncalled = dict(former_methods("strategy"))
    each_rank = {"num_replicas": strategy.replicas.count, "rank": strategy.replicas.index}
    if getattr(strategy, SAMPLER, None) == each_rank:  # scripts set it for Lightning; lockstep does the same
        del uncalled[SAMPLER]
    _refuse_overrides(strategy, uncalled, "Strategy")
    _refuse_overrides(strategy.precision, former_methods("precision"), "Precision")
    for callback in callbacks:
        _warn_of_former(callback, _defined_names(callback), former_methods("callback"))
        _warn_of_misspelt(callback, Callback, former_methods("callback"))
    _warn_of_misspelt(module, ModuleHooks, former_methods("module"))
    if datamodule is not None:
        _warn_of_misspelt(datamodule, LightningDataModule, ())


def check_removed_hooks(module: LightningModule, fn: TrainerFn) -> None:
    """Raise if a module defines hooks that Lightning has removed, because lockstep would never call them.

    Raises:
        NotImplementedError: the module has an ``*_epoch_end`` that takes outputs, which no Trainer calls since 2.0.
        MisconfigurationException: the module overrides both names of ``configure_model``.
    """
    kind, former = type(module).__name__, former_methods("module")
    for name, new in EPOCH_ENDS.get(fn, {}).items():
        if callable(getattr(module, name, None)):
            raise NotImplementedError(
                f"{kind}.{name}: Support for `{name}` has been removed in Lightning 2.0, so it is never called. Rename "
                f"it to `{new}(self)`, and collect outputs in an attribute of the module, by "
                "`self.outputs.append(...)` in the step."
            )
    _warn_of_former(module, (name for name in former if callable(getattr(module, name, None))), former)
    if is_overridden("configure_sharded_model", module, ModuleHooks):
        if is_overridden("configure_model", module, ModuleHooks):
            raise MisconfigurationException(
                f"{kind} overrides configure_model and configure_sharded_model, its old name: keep configure_model."
            )
        rank_zero_deprecation(f"{kind}.configure_sharded_model: rename it to configure_model, its current name.")


def _defined_names(owner: object) -> Iterator[str]:
    """Yield the names of the attributes that an object's classes define, except classes of lockstep and torch."""
    for kind in type(owner).__mro__:
        if kind.__module__.partition(".")[0] not in ("lockstep", "torch", "builtins", "abc", "typing"):
            yield from vars(kind)


def _refuse_overrides(owner: object, instead: Mapping[str, str], base: str) -> None:
    name = next((name for name in _defined_names(owner) if name in instead), None)
    if name is not None:
        raise MisconfigurationException(
            f"{type(owner).__name__}.{name}: a {base} of lockstep has no such method, so it would never be called. "
            f"Instead: {instead[name]}."
        )


def _warn_of_former(owner: object, names: Iterable[str], instead: Mapping[str, str]) -> None:
    today = ", ".join(f"{name} ({instead[name]})" for name in names if name in instead)
    if today:
        warn_once(
            f"{type(owner).__name__} defines former hooks, which are never called; their replacements are in "
            f"brackets: {today}."
        )


def _warn_of_misspelt(owner: object, base: type, known: Iterable[str]) -> None:
    hooks = [name for name in dir(base) if name.startswith("on_")]
    for name in _defined_names(owner):
        if name.startswith("on_") and not hasattr(base, name) and name not in known:
            meant = difflib.get_close_matches(name, hooks, 1, CLOSE)
            if meant:
                warn_once(
                    f"{type(owner).__name__}.{name} is not a hook, so the Trainer does not call it: did you mean "
                    f"{meant[0]}?"
                )


# -- callbacks that cannot do their work ----------------------------------------------------------------------


def check_contradictions(session: Session) -> None:
    """Raise if two callbacks average the weights; warn about a ModelCheckpoint that would never save.

    Raises:
        MisconfigurationException: names the callbacks.
    """
    # two averages: each would take the other's for the weights, and only one is left in the module at the end
    averages = [each for each in session.callbacks if each.averages_weights is True]  # a mock has every attribute
    if len(averages) > 1:
        names = " and ".join(type(each).__name__ for each in averages)
        raise MisconfigurationException(
            f"Trainer(callbacks=[{names}]): each writes its own average of the weights into the module, so one average "
            "would be lost: keep one of these callbacks."
        )
    config = session.config
    for callback in session.callbacks:
        if isinstance(callback, ModelCheckpoint) and not config.fast_dev_run:
            saves_nothing = callback.saves_nothing(config.max_epochs, config.max_steps)
            if saves_nothing:
                warn_once(saves_nothing)


# -- arguments of the user's step methods --------------------------------------------------------------------


def takes_idx(training_step: Callable[..., Any]) -> bool:
    """Return True if a ``training_step`` takes ``batch_idx``, whatever the parameter's name is."""
    positional, takes_any = _parameters_of(training_step)
    return takes_any or len(positional) > 1


def arguments_of(step: Callable[..., Any], several: bool, name: str) -> int:
    """Return how many of the arguments (batch, batch_idx, dataloader_idx), from the left, an evaluation step takes.

    Args:
        step: the user's step method.
        several: True if there are several loaders, which are read one after another.
        name: the method's name, for the error message.

    Raises:
        MisconfigurationException: the step takes a ``dataloader_iter``, or no ``dataloader_idx`` for several loaders.
    """
    wanted = 3 if several else 2
    refuse_iterator(step, name)
    if several:
        refuse_fewer(step, wanted, name, f"{name}(self, batch, batch_idx, dataloader_idx=0)")
    return _max_arguments(step, wanted)


def refuse_iterator(step: Callable[..., Any], name: str) -> None:
    """Raise if a step takes a ``dataloader_iter``.

    Raises:
        MisconfigurationException: names the arguments that the step may have.
    """
    if any(parameter.name == "dataloader_iter" for parameter in _parameters_of(step)[0]):
        raise MisconfigurationException(
            f"`{name}(dataloader_iter)` is not supported, because the order of data is planned "
            f"batch by batch. Define `{name}(batch, batch_idx)`."
        )


def refuse_fewer(method: Callable[..., Any], given: int, name: str, define: str) -> None:
    """Raise if a method does not accept ``dataloader_idx`` although there are several loaders.

    Args:
        method: a method of the module.
        given: number of arguments with which it is called.
        name: name of the method.
        define: a correct definition, for the error message.

    Raises:
        MisconfigurationException: shows the definition.
    """
    if _max_arguments(method, given) < given:
        raise MisconfigurationException(
            f"There are several loaders, but `{name}` does not take `dataloader_idx`: define it as `{define}`."
        )


def _max_arguments(method: Callable[..., Any], given: int) -> int:
    """Return how many positional arguments a method accepts, at most ``given``."""
    positional, takes_any = _parameters_of(method)
    return given if takes_any else min(given, len(positional))


def _parameters_of(method: Callable[..., Any]) -> tuple[list[inspect.Parameter], bool]:
    """Return (positional parameters of a method, True if the method has a ``*args`` parameter)."""
    found = list(inspect.signature(method).parameters.values())
    # a wrapper on the instance may show the signature of the class's function, with `self`
    wraps = not inspect.ismethod(method) and (hasattr(method, "__wrapped__") or hasattr(method, "__signature__"))
    if wraps and found and found[0].name == "self":
        del found[0]
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional, any(p.kind is p.VAR_POSITIONAL for p in found)


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return True if the hook ``hook_fx`` takes the argument ``param``.

    Args:
        hook_fx: the hook.
        param: name of the argument.
        explicit: accept only this name.
        min_args: unless ``explicit``, accept a hook with at least this many arguments, whatever their names.
    """
    parameters = inspect.signature(inspect.unwrap(hook_fx)).parameters
    named = [name for name in parameters if name != "self"]
    if param in named or explicit:
        return param in named
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    return takes_any or (min_args is not None and len(named) >= min_args)
