"""Trainer: the parts of a run put together; the loops are in ``loop/``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from lockstep.attributes import Attributes
from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import Checkpoint, ModelCheckpoint
from lockstep.callbacks.model_summary import ModelSummary
from lockstep.callbacks.progress.base import ProgressBar
from lockstep.callbacks.progress.choose import choose_progress_bar
from lockstep.config import RunConfig, resolve, unknown_flags
from lockstep.datamodule import LightningDataModule
from lockstep.ground.device import resolve_accelerator
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_only
from lockstep.ground.states import RunningStage, TrainerFn, TrainerState
from lockstep.launch.place import directly, here, launcher
from lockstep.loggers.base import DummyLogger
from lockstep.loggers.tensorboard import default_logger
from lockstep.loop import handover, state
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.fit import FitLoop, Result
from lockstep.loop.hooks import is_overridden
from lockstep.loop.loaders import Loaders
from lockstep.loop.results import Published
from lockstep.module import LightningModule
from lockstep.precision.names import make_precision
from lockstep.strategies.base import Strategy
from lockstep.strategies.names import make_strategy


class Trainer(Attributes):
    """Trains, validates, tests and uses a LightningModule, on one process or on many.

    Every argument is checked here, before anything is started.

    Args:
        accelerator: "auto" (a GPU if there is one), "cpu", "gpu" or "cuda".
        strategy: "auto" (one device: as it is; several: "ddp"), "ddp" (this script once per device),
            "ddp_spawn" (the call, in fresh processes), or a Strategy object.
        devices: how many (an int; on the CPU: processes), which (a list or "0,1"), -1 for all, or "auto".
        num_nodes: number of machines.
        precision: "32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", or the number alone.
        logger: True for the default one, False for none, a Logger or several.
        callbacks: a Callback or several.
        fast_dev_run: run one batch of everything (an int: so many), without loggers and checkpoints.
        max_epochs: end after so many epochs; -1: no limit. Default 1000 where nothing else limits the fit.
        min_epochs: do not stop early before.
        max_steps: end after so many optimizer steps; -1: no limit.
        min_steps: do not stop early before.
        max_time: end after "DD:HH:MM:SS", a timedelta, or its arguments as a dict.
        limit_train_batches: so many batches of an epoch (int), or this fraction (float).
        limit_val_batches: the same for each validation loader.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each prediction loader.
        val_check_interval: validate every so many batches (int), or after this fraction of an epoch (float).
        check_val_every_n_epoch: validate in every n-th epoch; None: the interval counts across epochs.
        num_sanity_val_steps: validation batches tried before training; -1: all.
        log_every_n_steps: how often values of single steps go to the loggers, in optimizer steps.
        enable_checkpointing: keep a checkpoint of the last epoch where no ModelCheckpoint is given.
        enable_progress_bar: show a progress bar on rank 0, where there is a terminal.
        enable_model_summary: print the layers and their parameters.
        accumulate_grad_batches: micro-batches of one optimizer step, or a dict from the first epoch to that.
        gradient_clip_val: bound of the gradient.
        gradient_clip_algorithm: "norm" (all parameters together) or "value" (each element).
        deterministic: ask torch for deterministic algorithms only; "warn": warn where there is none.
        benchmark: let cuDNN try its algorithms for the sizes at hand.
        inference_mode: evaluate under ``torch.inference_mode`` (else ``no_grad``).
        use_distributed_sampler: share loaders out over the ranks; False: take them as they are.
        detect_anomaly: look for NaN in backward, with the forward call that made it; slow.
        default_root_dir: where logs and checkpoints go; default: the working directory.
        order: "lockstep" (the order of data is a function of seed, epoch and position), or "torch" (torch's own
            permutation, for comparisons).

    Raises:
        MisconfigurationException: for a value or a combination that cannot work.

    Example::

        trainer = Trainer(max_epochs=3, devices=2)
        result = trainer.fit(model, train_loader, val_loader)
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int | dict[int, int] = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        detect_anomaly: bool = False,
        default_root_dir: str | os.PathLike[str] | None = None,
        order: str = "lockstep",
        **unknown: Any,
    ) -> None:
        unknown_flags(unknown)
        given = locals()
        self.config = resolve({name: given[name] for name in RunConfig.__dataclass_fields__})
        _apply_torch_settings(self.config)
        self.state = TrainerState()
        kind, self._node_devices = resolve_accelerator(accelerator, devices)
        self._devices_asked = None if devices == "auto" and kind == "cpu" else len(self._node_devices)
        self._num_nodes_asked = num_nodes
        placement = here(self._devices_asked, num_nodes)
        self.strategy = make_strategy(strategy, placement.world.size)
        self._precision = make_precision(precision, kind)
        self.connect()
        self._launch = launcher(self.strategy.launcher, placement)
        self._spawns = self._launch is not directly and self.strategy.launcher == "spawn"
        self.loggers: list[Any] = _loggers(logger, self.config)
        self.base_callbacks = _callbacks(
            callbacks, enable_checkpointing, enable_progress_bar, enable_model_summary, self.config
        )
        self.callbacks: list[Any] = self.base_callbacks
        self.lightning_module: Any = None
        self.datamodule: Any = None
        self.loaders = Loaders({}, None, None)
        self.seed: int | None = None
        self.should_stop = False
        self.received_sigterm = False
        self.interruption: str | None = None
        self.ckpt_path: str | None = None
        self.enable_validation = False
        self.hooks: Any = None
        self.results: Any = None
        self.agreement: Any = None
        self.stop_flag = self.interrupt_flag = 0
        self.published = Published()
        self.fit_loop = FitLoop(self)
        self.validate_loop = EvaluationLoop(self, RunningStage.VALIDATING)
        self.test_loop = EvaluationLoop(self, RunningStage.TESTING)
        self.predict_loop = EvaluationLoop(self, RunningStage.PREDICTING)

    def connect(self) -> None:
        """Find out which rank this process is; once here, and again in each process that was started."""
        world = here(self._devices_asked, self._num_nodes_asked).world
        device = self._node_devices[world.local_rank % len(self._node_devices)]
        self.strategy.connect(world, device, self._precision)
        rank_zero_only.rank = world.rank

    # -- what users call -----------------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> Result:
        """Train ``model``.

        Args:
            model: what to train.
            train_dataloaders: a loader, a dict or list of loaders, or a LightningDataModule.
            val_dataloaders: a loader or a list of loaders.
            datamodule: in place of loaders.
            ckpt_path: go on from this checkpoint; "last": from the newest one, if there is one.
            weights_only: False to unpickle a checkpoint of your own that holds more than plain types.

        Returns:
            how it ended, the same on every rank.
        """
        self._attach(TrainerFn.FITTING, model, {"train": train_dataloaders, "val": val_dataloaders}, datamodule)
        path = state.find(self, ckpt_path, model_given=True)
        if self._spawns:
            return self._hand_over(self.fit_loop, path, weights_only)
        return self._launch(self.fit_loop.run, path, weights_only)

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
    ) -> list[dict[str, float]]:
        """Measure a module on the validation data; gives the metrics of each loader, and prints them.

        Args:
            model: what to measure; None: the module of the last call, with its best checkpoint.
            dataloaders: a loader or a list of loaders, or a LightningDataModule.
            ckpt_path: weights to load first: a path, "best" or "last".
            verbose: print the metrics.
            datamodule: in place of loaders.
        """
        given = self._attach(TrainerFn.VALIDATING, model, {"val": dataloaders}, datamodule)
        path = state.find(self, ckpt_path, model_given=given)
        return self._call(self.validate_loop, path, verbose)

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
    ) -> list[dict[str, float]]:
        """Measure a module on the test data; arguments as for :meth:`validate`."""
        given = self._attach(TrainerFn.TESTING, model, {"test": dataloaders}, datamodule)
        path = state.find(self, ckpt_path, model_given=given)
        return self._call(self.test_loop, path, verbose)

    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Run ``predict_step`` over the data.

        Args:
            model: what to use; None: the module of the last call, with its best checkpoint.
            dataloaders: a loader or a list of loaders, or a LightningDataModule.
            datamodule: in place of loaders.
            return_predictions: False to keep nothing.
            ckpt_path: weights to load first: a path, "best" or "last".

        Returns:
            what ``predict_step`` returned for each batch of this rank; a list for each loader if there are several.
        """
        given = self._attach(TrainerFn.PREDICTING, model, {"predict": dataloaders}, datamodule)
        path = state.find(self, ckpt_path, model_given=given)
        return self._call(self.predict_loop, path, False, return_predictions is not False)

    def save_checkpoint(
        self, filepath: str | os.PathLike[str], weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write the run to a file; call it on every rank.

        Args:
            filepath: replaced as a whole, or not at all.
            weights_only: leave out what only a resume needs.
            storage_options: accepted for Lightning's signature; nothing reads it.
        """
        if self.lightning_module is None or self.hooks is None:
            raise MisconfigurationException(
                f"trainer.save_checkpoint({os.fspath(filepath)!r}): there is nothing to save before the first fit."
            )
        state.save(self, filepath, bool(weights_only))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0 only, above the progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar_callback
            (bar.print if bar is not None and bar.is_enabled else print)(*args, **kwargs)

    def send_to_loggers(self, metrics: dict[str, Any], step: int | None) -> None:
        """Send values to the loggers; a value named "step" replaces ``step``, None means the windows so far."""
        if not self.loggers:
            return
        scalars = {name: float(value) for name, value in metrics.items()}
        if "step" in scalars:
            step = int(scalars.pop("step"))
        else:
            scalars.setdefault("epoch", self.current_epoch)
        for logger in self.loggers:
            logger.log_metrics(metrics=scalars, step=self.fit_loop.progress.windows if step is None else step)
            logger.save()

    # -- calls ---------------------------------------------------------------------------------------------

    def _attach(self, fn: TrainerFn, model: LightningModule | None, given: dict[str, Any], datamodule: Any) -> bool:
        """Take in module and data of a call; tells whether a module was given."""
        self.state.fn = fn
        first = next(iter(given))
        if isinstance(given[first], LightningDataModule):
            datamodule, given[first] = given[first], None
        if datamodule is not None and any(value is not None for value in given.values()):
            raise MisconfigurationException(f"trainer.{fn}(): give loaders or `datamodule=`, not both.")
        module = self.lightning_module if model is None else model
        if not isinstance(module, LightningModule):
            raise MisconfigurationException(
                f"trainer.{fn}(model): give a lockstep.LightningModule, not {type(module).__name__}."
            )
        self.lightning_module = module
        self.datamodule = self.datamodule if datamodule is None and model is None else datamodule
        self.loaders = Loaders(given, self.datamodule, module)
        self.enable_validation = (
            fn is TrainerFn.FITTING
            and self.config.limit_val_batches != 0
            and self.loaders.defined("val")
            and is_overridden("validation_step", module, LightningModule)
        )
        return model is not None

    def _call(self, loop: Any, *args: Any) -> Any:
        return self._hand_over(loop, *args) if self._spawns else self._launch(loop.run, *args)

    def _hand_over(self, loop: Any, *args: Any) -> Any:
        """Run a loop in spawned processes, and go on here as if it had run here."""
        return handover.take_over(self, self._launch(handover.call, self, loop, *args))

    def __getstate__(self) -> dict[str, Any]:
        kept = dict(self.__dict__)
        for own in ("_launch", "hooks", "results", "agreement"):  # bound to one process
            kept[own] = None
        kept["_launch"], kept["_spawns"] = directly, False
        return kept


def _loggers(asked: Any, config: Any) -> list[Any]:
    if asked is False:
        return []
    if asked is None or asked is True:
        loggers = [default_logger(config.default_root_dir)] if not config.fast_dev_run else [DummyLogger()]
    else:
        loggers = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else [asked]
    for logger in loggers:
        if not callable(getattr(logger, "log_metrics", None)):
            raise MisconfigurationException(
                f"Trainer(logger={asked!r:.100}): give True, False, a Logger such as CSVLogger(folder), or several."
            )
    return [DummyLogger()] if config.fast_dev_run and loggers else loggers


def _callbacks(
    given: Any, checkpointing: bool | None, bar: bool | None, summary: bool | None, config: Any
) -> list[Any]:
    """The user's callbacks, and the default ones where none of their kind is given."""
    callbacks = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise MisconfigurationException(
                f"Trainer(callbacks=...): {callback!r:.100} is no lockstep.Callback; derive its class from it."
            )
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
        ("enable_model_summary", summary, ModelSummary, ModelSummary),
    ]
    for flag, asked, kind, make in defaults:
        there = [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]
        if there and asked is False:
            raise MisconfigurationException(
                f"Trainer({flag}=False, callbacks=[{', '.join(there)}(...)]): leave out the flag or the callback."
            )
        if not there and asked is not False and not (config.fast_dev_run and kind is Checkpoint):
            callbacks.append(make())
    return state.checkpoints_last(callbacks)


def _apply_torch_settings(config: Any) -> None:
    """Settings that torch keeps for the whole process."""
    if config.deterministic is not None:
        torch.use_deterministic_algorithms(bool(config.deterministic), warn_only=config.deterministic == "warn")
    if config.benchmark is not None:
        torch.backends.cudnn.benchmark = config.benchmark
