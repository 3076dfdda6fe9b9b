"""The callbacks of a Trainer: the user's, and the default ones where none of their kind is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.callbacks.checkpoint import Checkpoint
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.callbacks.model_summary import ModelSummary
from lockstep.callbacks.progress.base import ProgressBar
from lockstep.callbacks.progress.choose import choose_progress_bar
from lockstep.callbacks.rich_model_summary import choose_model_summary
from lockstep.config.foreign import check_kind
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.hooks import is_overridden
from lockstep.loop.state import checkpoints_last


def make_callbacks(
    given: Any, checkpointing: bool | None, bar: bool | None, summary: bool | None, config: Any
) -> list[Any]:
    """The callbacks of a Trainer, those that write checkpoints last.

    Args:
        given: as in ``Trainer(callbacks=...)``.
        checkpointing: as in ``Trainer(enable_checkpointing=...)``.
        bar: as in ``Trainer(enable_progress_bar=...)``.
        summary: as in ``Trainer(enable_model_summary=...)``.
        config: the RunConfig.

    Raises:
        MisconfigurationException: no callback, two that a checkpoint could not tell apart, a flag and a callback that
            contradict each other.
    """
    callbacks = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for callback in callbacks:
        check_kind("Trainer(callbacks=...)", callback, Callback, "Callback")
    keys = [callback.state_key for callback in callbacks if is_overridden("state_dict", callback, Callback)]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise MisconfigurationException(
            f"Trainer(callbacks=...): {len(keys)} callbacks share the state_key {sorted(twice)}, so a checkpoint could "
            "keep only one: give their classes a `state_key` property that tells them apart."
        )
    defaults: list[tuple[str, bool | None, type[Callback], Callable[[], Callback]]] = [
        ("enable_checkpointing", checkpointing, Checkpoint, ModelCheckpoint),
        ("enable_progress_bar", bar, ProgressBar, choose_progress_bar),
        ("enable_model_summary", summary, ModelSummary, lambda: choose_model_summary(callbacks)),
    ]
    for flag, asked, kind, make in defaults:
        if asked not in (True, False, None):
            raise MisconfigurationException(f"Trainer({flag}={asked!r}): give True or False.")
        there = [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]
        if there and asked is False:
            raise MisconfigurationException(
                f"Trainer({flag}=False, callbacks=[{', '.join(there)}(...)]): leave out the flag or the callback."
            )
        if not there and asked is not False and not (config.fast_dev_run and kind is Checkpoint):
            callbacks.append(make())
    return checkpoints_last(callbacks)
