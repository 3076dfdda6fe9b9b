"""The loggers that ``Trainer(logger=...)`` stands for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lockstep.config.foreign import check_not_lightnings
from lockstep.ground.errors import MisconfigurationException
from lockstep.loggers.base import DummyLogger
from lockstep.loggers.tensorboard import default_logger


def make_loggers(asked: Any, config: Any) -> list[Any]:
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
