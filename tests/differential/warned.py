"""The warnings of a program, by what they are about; and a process that is afterwards what it was."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
import random
import re
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.ground import rank as rank_module
from tests.differential.record import Record

TOPICS = {
    "log_every_n_steps": r"log_every_n_steps|logging interval",
    "batch size": r"infer the `?batch_size|batch size.*(ambiguous|taken)",
    "training_step returned None": r"returned `?None",
    "scheduler without a metric": r"ReduceLROnPlateau conditioned|lr scheduler.s metric",
    "no optimizer": r"configure_optimizers.*None|`?None`?.*configure_optimizers|no optimizer",
    "early stopping without its metric": r"[Ee]arly ?stopping conditioned|EarlyStopping.*(not available|is not logged)",
    "order of schedulers and optimizers": r"lr_scheduler.step\(\)` before",
    "detached": r"does not require grad",
    "max_epochs": r"max_epochs` was not set",
}


class Forgetful:
    """Makes Lightning's caches of warnings, which live as long as the process, tell every program."""

    @classmethod
    @functools.cache
    def install(cls) -> None:
        cache: Any = importlib.import_module("lightning.fabric.utilities.rank_zero").WarningCache
        cache.__contains__ = lambda *_: False


@contextlib.contextmanager
def quiet(record: Record) -> Iterator[None]:
    """Warnings are kept, and nothing is printed; signal handlers, random states and levels are put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    names = ("lightning.pytorch", "lightning.fabric", "lightning", "lockstep")
    levels = {name: logging.getLogger(name).level for name in names}
    environment = dict(os.environ)
    told, rank_module._warned = rank_module._warned, set()  # each program is told once
    Forgetful.install()
    states = torch.get_rng_state(), random.getstate()
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        rank_module._warned = told
        torch.set_rng_state(states[0])
        random.setstate(states[1])
    record.warned |= {about(warning.message, warning.category) for warning in caught}


def about(message: Warning | str, category: type[Warning]) -> str:
    """What a warning is about: a topic, or its first words where it has none; and the class to filter it by."""
    text = str(message)
    topic = next((topic for topic, pattern in TOPICS.items() if re.search(pattern, text)), None)
    shown = next(kind.__name__ for kind in category.__mro__ if kind.__module__ == "builtins")
    return f"{topic or ' '.join(re.sub(r'[0-9.]+', '#', text).split()[:8])} ({shown})"
