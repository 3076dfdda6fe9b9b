"""Tuner: searches for a learning rate or a batch size, before a fit or an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.callbacks.model_summary import ModelSummary
from lockstep.callbacks.progress.base import ProgressBar
from lockstep.datamodule import LightningDataModule
from lockstep.extensions.extras.tuner import batch_size, lr_finder
from lockstep.extensions.extras.tuner.batch_size import BatchSizeFinder
from lockstep.extensions.extras.tuner.lr_finder import LearningRateFinder, LRFinder
from lockstep.extensions.extras.tuner.trial import (
    SilentLogger,
    in_session,
    refuse_several_processes,
    refuse_without_undo,
)
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.seed import isolate_rng
from lockstep.ground.types import EVAL_DATALOADERS, TRAIN_DATALOADERS, RunningStage, TrainerFn
from lockstep.loop.call import CallArguments, call
from lockstep.loop.hooks import by_position
from lockstep.loop.session import FitState
from lockstep.module import LightningModule
from lockstep.supervise.status import watch_uncaught
from lockstep.trainer import Trainer

Method = Literal["fit", "validate", "test", "predict"]


class Tuner:
    """Tool that searches for the learning rate or the batch size of a Trainer's next call.

    A search sets the module up as that call would (``prepare_data``, ``setup``, ``configure_optimizers``, at the end
    ``teardown``) and runs steps of it. The result is written to the attribute that your code reads. Module, optimizers,
    counters, callbacks, loggers and random states are restored afterwards, bit for bit.

    Args:
        trainer: the Trainer; trials use its devices, precision and flags.

    Example::

        tuner = Tuner(trainer)
        tuner.scale_batch_size(model, datamodule=data, mode="binsearch")    # sets data.batch_size
        finder = tuner.lr_find(model, datamodule=data)                      # sets model.lr
        finder.plot(suggest=True).savefig("lr.png")
        trainer.fit(model, datamodule=data)
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: LightningModule,
        train_dataloaders: TRAIN_DATALOADERS = None,
        val_dataloaders: EVAL_DATALOADERS = None,
        dataloaders: EVAL_DATALOADERS = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFinder | None:
        """Train with a learning rate that rises at each step; suggest the rate at which the loss falls fastest.

        Args:
            model: the module to train.
            train_dataloaders: as for ``trainer.fit``; the test repeats them as needed.
            val_dataloaders: as for ``trainer.fit``.
            dataloaders: must be None, because only "fit" is supported.
            datamodule: a data module instead of loaders.
            method: "fit".
            min_lr: first rate.
            max_lr: last rate.
            num_training: number of rates, one a step.
            mode: "exponential" or "linear".
            early_stop_threshold: stop when the smoothed loss exceeds this multiple of the best one; None never stops.
            update_attr: set the attribute to the suggestion.
            attr_name: attribute of the module, the data module, or their hparams; default: `lr` or `learning_rate`.

        Returns:
            Rates and losses, with ``suggestion()`` and ``plot()``; None in a ``fast_dev_run``.

        Raises:
            MisconfigurationException: the method is not "fit", the strategy cannot undo steps, or there are several
                optimizers or manual optimization.
            ValueError: a setting is invalid, or the Trainer has a LearningRateFinder.
            AttributeError: ``update_attr`` is True, but the attribute does not exist.
        """
        if method != "fit":
            raise MisconfigurationException(f"lr_find(method={method!r}): only method='fit' has a learning rate.")
        _check_loaders("lr_find", method, train_dataloaders, val_dataloaders, dataloaders)
        _check_callbacks(self._trainer, LearningRateFinder)
        settings = lr_finder.RangeTest(
            min_lr, max_lr, num_training, mode.lower(), early_stop_threshold, update_attr, attr_name
        )
        show = self._trainer.progress_bar_callback is not None
        given = {"train": train_dataloaders, "val": val_dataloaders}
        refuse_without_undo(self._trainer, "The learning rate finder")

        def find() -> LRFinder | None:
            with _prepared(self._trainer, TrainerFn.FITTING, model, given, datamodule):
                return lr_finder.lr_find(self._trainer, settings, show_progress=show)

        found: LRFinder | None = self._trainer._launch(find)
        return found

    def scale_batch_size(
        self,
        model: LightningModule,
        train_dataloaders: TRAIN_DATALOADERS = None,
        val_dataloaders: EVAL_DATALOADERS = None,
        dataloaders: EVAL_DATALOADERS = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size that fits into memory, and set the attribute ``batch_arg_name`` to it.

        Args:
            model: the module to run.
            train_dataloaders: a data module for "fit". Loaders are refused, because their batch size is fixed.
            val_dataloaders: loaders for "fit". Validation runs only if a trial reaches the end of an epoch.
            dataloaders: a data module for the other methods.
            datamodule: data module with loader hooks that read the attribute; default: the hooks of the model.
            method: "fit", "validate", "test" or "predict".
            mode: "power": double until memory is exhausted, and take the last size that fits; "binsearch": then bisect
                to the largest size that fits.
            steps_per_trial: number of optimizer steps ("fit") or batches for each size.
            init_val: first size, in samples.
            max_trials: number of sizes that fit before the search ends.
            batch_arg_name: attribute of the module, the data module, or their hparams.
            margin: with "binsearch", fraction that is subtracted from the result.
            max_val: largest size to try, in samples.

        Returns:
            The size; None in a ``fast_dev_run``. The search also ends at a size that covers the whole data set.

        Raises:
            MisconfigurationException: loaders are given as objects, there are several processes, or the attribute does
                not exist.
            ValueError: a setting is invalid, or the Trainer has a BatchSizeFinder.
            RuntimeError: not even one sample fits into memory.
        """
        if method not in batch_size.STAGES:
            raise ValueError(f"scale_batch_size(method={method!r}): pass one of {', '.join(batch_size.STAGES)}.")
        _check_loaders("scale_batch_size", method, train_dataloaders, val_dataloaders, dataloaders)
        _check_callbacks(self._trainer, BatchSizeFinder)
        settings = batch_size.BatchSizeSearch(
            mode.lower(), steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val
        )
        given = {batch_size.STAGES[method]: dataloaders}
        if method == "fit":
            given = {"train": train_dataloaders, "val": val_dataloaders}
        refuse_several_processes(self._trainer, "The batch size finder")
        with _prepared(self._trainer, TrainerFn(method), model, given, datamodule):
            return batch_size.scale_batch_size(self._trainer, settings)


def _check_loaders(search: str, method: str, train: object, val: object, others: object) -> None:
    if method == "fit" and others is not None:
        raise MisconfigurationException(
            f"{search}(method='fit', dataloaders=...): use train_dataloaders= and val_dataloaders=, or datamodule=."
        )
    if method != "fit" and (train is not None or val is not None):
        raise MisconfigurationException(
            f"{search}(method={method!r}, train_dataloaders= or val_dataloaders=...): use dataloaders= or datamodule=."
        )


def _check_callbacks(trainer: Trainer, kind: type) -> None:
    if any(isinstance(callback, kind) for callback in trainer.base_callbacks):
        raise ValueError(
            f"Trainer(callbacks=[{kind.__name__}(...)]) already runs the same search. Remove the callback to use the "
            "Tuner."
        )


class _OnlySetUp(Callback):
    """Wrapper around a user's callback during a search, which calls only the callback's ``setup`` and ``teardown``."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        by_position(self._callback, "setup")(trainer, pl_module, stage)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        by_position(self._callback, "teardown")(trainer, pl_module, stage)


@contextmanager
def _prepared(
    trainer: Trainer, fn: TrainerFn, model: LightningModule, given: dict[str, Any], data: LightningDataModule | None
) -> Iterator[None]:
    """Set up a Trainer call up to the start of its loop, for the block. Restore the Trainer after the block.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; raised after everything is restored.
    """
    watching = (Checkpoint, ProgressBar, ModelSummary, LearningRateFinder, BatchSizeFinder)
    trainer._attach(fn, model, given, data)
    session = trainer.session
    # Callbacks that watch a run, and other searches, have nothing to set up for a trial.
    only_set_up = [_OnlySetUp(callback) for callback in session.base_callbacks if not isinstance(callback, watching)]
    inside = session.branch(
        base_callbacks=only_set_up,
        loggers=[SilentLogger(logger) for logger in session.loggers],
        fit=FitState(),
        should_stop=False,
    )
    with in_session(trainer, inside):
        try:
            with isolate_rng(), call(inside, CallArguments(fn, None, None, trainer.fit_loop.release)):
                if fn is not TrainerFn.FITTING:
                    inside.state.stage = RunningStage(str(fn))
                yield
        except BaseException:
            watch_uncaught()
            raise
        if inside.interruption is not None:
            raise KeyboardInterrupt
