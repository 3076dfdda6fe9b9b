"""The callbacks and loggers of a Trainer: the user's, and the default ones where none of their kind is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import Checkpoint, ModelCheckpoint
from lockstep.callbacks.model_summary import ModelSummary, choose_model_summary
from lockstep.callbacks.progress.base import ProgressBar
from lockstep.callbacks.progress.plain import choose_progress_bar
from lockstep.config.plugins import check_kind, check_not_lightnings
from lockstep.config.run import RunConfig
from lockstep.ground.errors import MisconfigurationException
from lockstep.loggers.base import DummyLogger, Logger
from lockstep.loggers.tensorboard import default_logger
from lockstep.loop.hooks import is_overridden
from lockstep.loop.state import checkpoints_last

# -- callbacks -----------------------------------------------------------------------------------------------


def make_callbacks(
    given: Callback | list[Callback] | None,
    checkpointing: bool | None,
    bar: bool | None,
    summary: bool | None,
    config: RunConfig,
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


# -- loggers -------------------------------------------------------------------------------------------------


def make_loggers(asked: Logger | Iterable[Logger] | bool | None, config: RunConfig) -> list[Any]:
    """The loggers of a Trainer.

    Args:
        asked: True or None for the default one, False for none, a Logger or several.
        config: the RunConfig.

    Raises:
        MisconfigurationException: something that cannot log.
    """
    if asked is False:
        return []
    if asked is None or asked is True:
        loggers = [default_logger(config.default_root_dir)] if not config.fast_dev_run else [DummyLogger()]
    else:
        loggers = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else [asked]
    for logger in loggers:
        if isinstance(logger, type) or not callable(getattr(logger, "log_metrics", None)):
            check_not_lightnings("Trainer(logger=...)", logger)
            raise MisconfigurationException(
                f"Trainer(logger={asked!r:.100}): give True, False, a Logger such as CSVLogger(folder), or several."
            )
    return [DummyLogger()] if config.fast_dev_run and loggers else loggers
