"""Methods of the user's that nobody would call: hooks of other times, overrides of what a base does not have, misspelt
hooks. The first two are refused or told with what to write instead, the last is told.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lockstep.callbacks.base import Callback
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_deprecation, warn_once
from lockstep.ground.types import TrainerFn
from lockstep.hooks import ModuleHooks
from lockstep.loop.hooks import is_overridden
from lockstep.module import LightningModule
from lockstep.names.former_methods import former_methods

_OF_VALIDATION = {"validation_epoch_end": "on_validation_epoch_end"}
EPOCH_ENDS = {
    TrainerFn.FITTING: {"training_epoch_end": "on_train_epoch_end", **_OF_VALIDATION},
    TrainerFn.VALIDATING: _OF_VALIDATION,
    TrainerFn.TESTING: {"test_epoch_end": "on_test_epoch_end"},
}
"""Hooks that took the outputs of all batches, by the call that would have called them, and today's names."""
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
    uncalled = dict(former_methods("strategy"))
    each_rank = {"num_replicas": strategy.replicas.count, "rank": strategy.replicas.index}
    if getattr(strategy, SAMPLER, None) == each_rank:  # which is what lockstep does
        del uncalled[SAMPLER]
    _refuse_overrides(strategy, uncalled, "Strategy")
    _refuse_overrides(strategy.precision, former_methods("precision"), "Precision")
    for callback in callbacks:
        _tell_former(callback, _written(callback), former_methods("callback"))
        _tell_misspelt(callback, Callback, former_methods("callback"))
    _tell_misspelt(module, ModuleHooks, former_methods("module"))
    if datamodule is not None:
        _tell_misspelt(datamodule, LightningDataModule, ())


def check_removed_hooks(module: LightningModule, fn: TrainerFn) -> None:
    """Refuse a module whose results would silently be missing.

    Raises:
        NotImplementedError: it has an ``*_epoch_end`` that takes outputs, which no Trainer has called since 2.0.
        MisconfigurationException: it overrides both names of ``configure_model``.
    """
    kind, former = type(module).__name__, former_methods("module")
    for name, new in EPOCH_ENDS.get(fn, {}).items():
        if callable(getattr(module, name, None)):
            raise NotImplementedError(
                f"{kind}.{name}: Support for `{name}` has been removed in Lightning 2.0, and nobody calls it. Rename "
                f"it to `{new}(self)`, and collect what it needs in an attribute of the module, by "
                "`self.outputs.append(...)` in the step."
            )
    _tell_former(module, (name for name in former if callable(getattr(module, name, None))), former)
    if is_overridden("configure_sharded_model", module, ModuleHooks):
        if is_overridden("configure_model", module, ModuleHooks):
            raise MisconfigurationException(
                f"{kind} overrides configure_model and configure_sharded_model, its old name: keep configure_model."
            )
        rank_zero_deprecation(f"{kind}.configure_sharded_model: rename it to configure_model, its name of today.")


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


def _tell_former(owner: object, names: Iterable[str], instead: Mapping[str, str]) -> None:
    today = ", ".join(f"{name} ({instead[name]})" for name in names if name in instead)
    if today:
        warn_once(
            f"{type(owner).__name__} has hooks of old that nobody calls; in brackets what is called today: {today}."
        )


def _tell_misspelt(owner: object, base: type, known: Iterable[str]) -> None:
    hooks = [name for name in dir(base) if name.startswith("on_")]
    for name in _written(owner):
        if name.startswith("on_") and not hasattr(base, name) and name not in known:
            meant = difflib.get_close_matches(name, hooks, 1, CLOSE)
            if meant:
                warn_once(f"{type(owner).__name__}.{name} is no hook, and the Trainer does not call it: {meant[0]}?")
