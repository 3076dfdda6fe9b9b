"""Hooks of earlier versions that nobody calls any more: refused or told of, before anything starts."""

from __future__ import annotations

from typing import Any

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_deprecation, warn_once
from lockstep.ground.states import TrainerFn
from lockstep.hooks import ModuleHooks
from lockstep.loop.hooks import is_overridden

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


def check_removed_hooks(module: Any, fn: TrainerFn) -> None:
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
