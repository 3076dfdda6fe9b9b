"""A trial: some windows, or some batches of an evaluation, after which nothing is different."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.states import RunningStage, TrainerFn, TrainerState
from lockstep.loggers.base import DummyLogger
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.fit import FitLoop
from lockstep.loop.hooks import Hooks, is_overridden
from lockstep.loop.optimizers import parse
from lockstep.loop.progress import EPOCH_START
from lockstep.loop.results import Published, Results
from lockstep.module import LightningModule
from lockstep.tuner.kept import Kept

LOOPS = {
    "validate_loop": RunningStage.VALIDATING,
    "test_loop": RunningStage.TESTING,
    "predict_loop": RunningStage.PREDICTING,
}


class SilentLogger(DummyLogger):
    """Keeps nothing of a trial, and says of itself (name, folder) what the user's logger says."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    @property
    def name(self) -> Any:
        """The user's logger's."""
        return self._logger.name

    @property
    def version(self) -> Any:
        """The user's logger's."""
        return self._logger.version

    @property
    def save_dir(self) -> Any:
        """The user's logger's."""
        return getattr(self._logger, "save_dir", None)

    @property
    def root_dir(self) -> Any:
        """The user's logger's."""
        return getattr(self._logger, "root_dir", None)

    @property
    def log_dir(self) -> Any:
        """The user's logger's."""
        return getattr(self._logger, "log_dir", None)


def alone(trainer: Any, what: str) -> None:
    """Refuse several ranks.

    Raises:
        MisconfigurationException: the Trainer starts, or is one of, several processes.
    """
    if trainer.world_size > 1 or trainer._spawns:
        raise MisconfigurationException(
            f"{what} works on one process; this Trainer has {trainer.world_size}"
            f"{' that it spawns' if trainer._spawns else ''}. All ranks would have to find the same, out of memory or "
            "not, which is not built yet: search with `Trainer(devices=1)` and give the result to the other Trainer."
        )


@contextmanager
def trial(trainer: Any, kept: Kept, callbacks: list[Callback], **flags: Any) -> Iterator[None]:
    """The Trainer as if in a call of its own: ``callbacks`` and no others, nothing logged or saved.

    Afterwards, also after an exception, everything is what it was when ``kept`` was made; a Ctrl-C is passed on.

    Args:
        trainer: inside a call, set up by its session; the trial uses the same module, optimizers and loader hooks.
        kept: what to put back.
        callbacks: those of the trial.
        flags: fields of the trial's RunConfig.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    before, strategy_before = dict(vars(trainer)), dict(vars(strategy))
    quiet = {"num_sanity_val_steps": 0, "min_epochs": 0, "min_steps": 0, "max_time": None, "log_every_n_steps": 1}
    validation = {"val_check_interval": 1.0, "check_val_every_n_epoch": trainer.config.check_val_every_n_epoch or 1}
    trainer.config = replace(trainer.config, **quiet, **validation, **flags)
    trainer.state = TrainerState(trainer.state.status, trainer.state.fn, trainer.state.stage)
    trainer.loggers = [SilentLogger(logger) for logger in trainer.loggers]
    trainer.callbacks, trainer.hooks = callbacks, Hooks(trainer, module, callbacks)
    trainer.results, trainer.published = Results.of(strategy, module), Published()
    trainer.should_stop, trainer.interruption = False, None
    progress = trainer.fit_loop.progress
    trainer.fit_loop = FitLoop(trainer)
    trainer.fit_loop.progress = replace(progress, batch=0, last=False, phase=EPOCH_START)
    for name, stage in LOOPS.items():
        setattr(trainer, name, EvaluationLoop(trainer, stage))
    kept.drop_gradients()
    try:
        yield
    finally:
        for name in ("fit_loop", *LOOPS):
            getattr(trainer, name).release()
        interruption = trainer.interruption
        for owner, values in ((trainer, before), (strategy, strategy_before)):
            vars(owner).clear()
            vars(owner).update(values)
        kept.put_back()
        if interruption is not None:
            trainer.interruption, trainer.should_stop = interruption, True


def train(trainer: Any) -> None:
    """Train inside a trial, epoch after epoch, until its ``max_steps`` or ``should_stop``."""
    loop, most = trainer.fit_loop, trainer.config.max_steps
    loop._most_steps = math.inf if most == -1 else most
    loop.results = trainer.results
    loop.step.setup()
    trainer.state.stage = RunningStage.TRAINING
    loop.setup_data()
    if loop._validates:
        loop.validation.setup_data()
    trainer.hooks.call("on_train_start")
    while loop.feed.num_batches and loop._done_in_epoch() is None:
        loop.epoch()
    trainer.hooks.call("on_train_end")


def evaluate(trainer: Any) -> Any:
    """Validate, test or predict inside a trial; gives the loop."""
    stage = trainer.state.stage
    (loop,) = (getattr(trainer, name) for name, each in LOOPS.items() if each is stage)
    loop.setup_data()
    if loop.feed is None:
        return loop
    if len(loop.feed.num_batches) > 1:
        raise MisconfigurationException(
            f"A search for the batch size of trainer.{trainer.state.fn}() takes one loader; there are "
            f"{len(loop.feed.num_batches)}: search with one at a time."
        )
    if stage is RunningStage.PREDICTING:
        loop.predict(False)
    else:
        loop.evaluate()
    return loop


def configure_again(trainer: Any) -> None:
    """Ask the module for its optimizers anew, before the first window: they may depend on what was found."""
    module = trainer.lightning_module
    own_step = is_overridden("lr_scheduler_step", module, LightningModule)
    returned = trainer.hooks.own("configure_optimizers")
    found = parse(returned, automatic=module.automatic_optimization, custom_scheduler_step=own_step)
    trainer.strategy.setup_optimizers(*found)


def has_begun(trainer: Any) -> bool:
    """Whether the fit's training has begun, so that its optimizers have a past."""
    return trainer.state.fn is TrainerFn.FITTING and trainer.state.stage is not None
