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
    "no effect": (
        r"saves nothing( with|\. Remove)|the former sets the latter|overfit_batches overrides|"
        r"every_n_(epochs|train_steps)=\d+\) with Trainer|has no effect: values are|"
        r"needs a logger, but the Trainer has none|logs nothing, because the Trainer has no logger|"
        r"has nowhere to write: the Trainer|(and there is no logger|but the Trainer has no logger): (set|give)"
    ),
    "log_every_n_steps": r"log_every_n_steps|logging interval",
    "batch size": r"infer the `?batch_size|batch size.*(ambiguous|taken)",
    "training_step returned None": r"returned `?None",
    "scheduler without a metric": r"ReduceLROnPlateau conditioned|lr scheduler.s metric",
    "earlier weights": r"the checkpoint of step \d+ is ranked by",
    "no optimizer": r"configure_optimizers.*None|`?None`?.*configure_optimizers|no optimizer",
    "early stopping without its metric": r"[Ee]arly ?stopping conditioned|EarlyStopping.*(not available|is not logged)",
    "checkpoint without its metric": r"could not find the monitored key|no metric with this name was logged",
    "order of schedulers and optimizers": r"lr_scheduler.step\(\)` before",
    "detached": r"does not require grad",
    "max_epochs": r"max_epochs` was not set",
    "no validation": r"validation_step.*but (have )?no .?val_dataloader",
    "no momentum": r"log_momentum=True",
    "another folder": r"dirpath has changed from|checkpoint was saved in .*this run saves in",
    "overfit and shuffled": r"requested to overfit but enabled|overfit_batches=\.\.\.\).*shuffles",
    "no last checkpoint": r"there is no last checkpoint available|there is no checkpoint yet",
    "already in the optimizer": r"already exist within another group|are in another group of",
    "SWA that begins late": r"SWA is initializing after|not in epoch .* as requested",
    "no batch indices": r"infer the batch indices|`batch_indices` is empty, because|does not tell which samples",
    "no batches": r"Total length of|has no batches",
    "hooks of transfer": r"overridden `(on_before_batch_transfer|transfer_batch_to_device|on_after_batch_transfer)`",
    "averaging of made layers": r"WeightAveraging callback with a model",
    "saves in manual optimization": r"Using ModelCheckpoint with manual optimization",
    "folder of checkpoints": r"Checkpoint directory .* exists and is not empty",
    "scheduler of SWA": r"SWA is currently only supported every epoch",
    "no module": r"was called without a model",
    "modules in eval mode": r"in eval mode",
    "nothing left to train": r"there is nothing left to train",
    "uneven loaders": r"[Ll]oaders that are read together are split unevenly",
    "loaders that stay": r"reload_dataloaders_every_n_epochs=\d+\): fit\(\) got",
    "lost states": r"callbacks used to create the checkpoint|the states of callbacks that this Trainer",
    "one cycle by epochs": r"OneCycleLR.*(Are you sure|stepped once an epoch)",
}
"""What a warning is about, and the words by which either says it; others are compared by their first words."""
LEFT_OUT = re.compile("does not have many workers|`srun` command is available|treespec, LeafSpec")
"""Warnings of the machine (its cores, its commands) and torch's of what it has deprecated."""


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
    record.warned |= {(shown_class(each.category), str(each.message)) for each in caught if not left_open(each)}


def left_open(warning: warnings.WarningMessage) -> bool:
    """Whether it is of a file that Lightning has left open: that is told when the file is collected, which may be in a
    later program."""
    return issubclass(warning.category, ResourceWarning) and f"{os.sep}lightning{os.sep}" in str(warning.message)


def shown_class(category: type[Warning]) -> str:
    """The class of Python's own by which a warning can be filtered."""
    return next(kind.__name__ for kind in category.__mro__ if kind.__module__ == "builtins")


def about(kind: str, text: str) -> str:
    """What a warning is about: a topic, or its first words where it has none; and its class."""
    topic = next((topic for topic, pattern in TOPICS.items() if re.search(pattern, text)), None)
    return f"{topic or ' '.join(re.sub(r'[0-9.]+', '#', text).split()[:8])} ({kind})"
