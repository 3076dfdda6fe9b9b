"""Trainer: the public class that assembles the parts of a run. The loops are in ``loop/``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from torch import nn
from typing_extensions import Never

from lockstep.attributes import Attributes
from lockstep.callbacks.base import Callback
from lockstep.cluster.detect import Placement
from lockstep.config.devices import (
    announce_device,
    apply_to_process,
    check_devices,
    check_root,
    device_of,
    node_devices,
    nodes,
)
from lockstep.config.objects import (
    check_constructed,
    check_kind,
    check_not_lightnings,
    make_callbacks,
    make_loggers,
    make_profiler,
    sort_plugins,
)
from lockstep.config.run import (
    NonFinite,
    config_of,
    defaults_of,
    may_have_old_flags,
    refuse_unknown_flags,
    refuse_unsupported_flags,
    strip,
    synchronizes_batchnorm,
)
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.engines.table import drives_all_devices, make_strategy
from lockstep.ground.accelerators import Accelerator, find_accelerator
from lockstep.ground.device import creating
from lockstep.ground.errors import MisconfigurationException, MissingAttribute
from lockstep.ground.extensions import load
from lockstep.ground.methods import kept
from lockstep.ground.rank import rank_zero_only, warn_once
from lockstep.ground.torch_support import warn_of_untested_torch
from lockstep.ground.types import Planned, RunningStage, TrainerFn, Verified
from lockstep.launch.environment import flags_of, number_devices
from lockstep.launch.topology import directly, here, is_interactive, is_placed_by_cluster, launcher
from lockstep.loggers.base import Logger
from lockstep.loop import state
from lockstep.loop.call import check_steps
from lockstep.loop.compiled import unwrapped
from lockstep.loop.ending import Result
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.fit import FitLoop
from lockstep.loop.hooks import is_overridden
from lockstep.loop.session import RunLoaders, Session
from lockstep.module import LightningModule
from lockstep.precision.formats import make_precision
from lockstep.profilers.base import PassThroughProfiler, Profiler

STAYED_THERE = (
    "the call ran in other processes. When they ended, the optimizer states and everything else that a resume needs "
    "were lost. To resume, save with ModelCheckpoint or in a hook; to save the weights alone, pass weights_only=True."
)

SAVED_WITHIN = (
    "trainer.save_checkpoint in `{hook}`, while a training batch runs: a run that resumes from this file repeats the "
    "batch and its window. The repeated batch draws different random numbers, and some work counts twice: an optimizer "
    "step that has already run, and buffers and logged values if the window has one batch. Save in "
    "`on_train_batch_end`, or with ModelCheckpoint(every_n_train_steps=...)."
)


class Trainer(Attributes):
    """Trainer of a LightningModule: trains, validates, tests and predicts, on one process or on many.

    All arguments are checked in the constructor, before any process is started.

    Args:
        accelerator: kind of device: "auto" (an accelerator if there is one, else the CPU), "gpu", "cpu", "cuda", "mps",
            "xpu", "tpu", the name of any other device that torch has, or an Accelerator.
        strategy: "auto" (one device: no strategy is needed; several: "ddp", in a notebook "ddp_notebook"), "ddp" (runs
            this script once per device), "ddp_spawn" and "ddp_notebook" (run the call in fresh processes), "ddp_fork"
            (runs the call in copies of this process), "fsdp", "dp" (one process for all devices), or a Strategy
            object. All names are in ``engines/table.py``.
        devices: number of devices (int; on the CPU: processes), their numbers (a list or "0,1"), -1 for all, or "auto".
        num_nodes: number of machines.
        precision: "32-true" (default), "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "fp8-mixed", or the
            number alone.
        logger: True (default): TensorBoardLogger, or CSVLogger if tensorboard is not installed; False: none; or a
            Logger or several.
        callbacks: a Callback or several.
        fast_dev_run: run one batch (True) or this many (int) of each loader, without loggers and checkpoints.
        max_epochs: stop after this many epochs; -1: no limit. Default 1000 unless `max_steps` or `max_time` is given.
        min_epochs: train at least this many epochs before an early stop.
        max_steps: stop after this many optimizer steps; -1: no limit.
        min_steps: train at least this many optimizer steps before an early stop.
        max_time: stop after this time: "DD:HH:MM:SS" (days, hours, minutes, seconds), a timedelta, or its arguments as
            a dict.
        limit_train_batches: number (int) or fraction (float) of the batches of an epoch; default 1.0.
        limit_val_batches: number or fraction of the batches of each validation loader; default 1.0.
        limit_test_batches: number or fraction of the batches of each test loader; default 1.0.
        limit_predict_batches: number or fraction of the batches of each prediction loader; default 1.0.
        overfit_batches: train and validate on the same batches in every epoch, without shuffling: a number (int) or a
            fraction (float); 0.0: off.
        val_check_interval: time between two validations: training batches (int), a fraction of an epoch (float; default
            1.0), or wall-clock time ("DD:HH:MM:SS", a timedelta, or its arguments as a dict).
        check_val_every_n_epoch: validate in every n-th epoch; None: `val_check_interval` counts across epochs.
        num_sanity_val_steps: validation batches to try before training; default 2; -1: all.
        log_every_n_steps: optimizer steps between two records of step values in the loggers; default 50; 0: none.
        enable_checkpointing: save a checkpoint of the last epoch if no ModelCheckpoint is given; default True.
        enable_progress_bar: show a progress bar on rank 0, if there is a terminal; default True.
        enable_model_summary: print the layers and their parameters; default True.
        accumulate_grad_batches: micro-batches of one optimizer step; or a dict from the first epoch (from 0) to that
            number. Default 1.
        gradient_clip_val: bound of the gradient; None or 0: no clipping.
        gradient_clip_algorithm: "norm" (default; total 2-norm over all parameters) or "value" (each element).
        deterministic: use deterministic algorithms only, and raise if an operation has none; "warn": only warn.
        benchmark: let cuDNN choose its fastest algorithm for the sizes at hand; off under ``deterministic``.
        inference_mode: evaluate under ``torch.inference_mode``; False: under ``torch.no_grad``.
        use_distributed_sampler: distribute the samples of loaders over the ranks; False: use each rank's loader as it
            is.
        profiler: measure where time goes: "simple", "advanced", "pytorch", or a Profiler.
        detect_anomaly: raise at a NaN in backward and print the forward call that caused it; slow.
        barebones: turn off everything that costs time besides the steps, ``self.log`` included.
        plugins: a Precision, a ClusterEnvironment that determines the rank of this process, or a CheckpointIO that
            writes and reads checkpoints; one or several.
        sync_batchnorm: compute the statistics of BatchNorm over all ranks while training.
        reload_dataloaders_every_n_epochs: call the loader hooks again every n epochs; 0: never.
        default_root_dir: folder of logs and checkpoints; default: the working directory.
        enable_autolog_hparams: send the hyperparameters of the module and the data module to the loggers.
        model_registry: only None.
        order: order of training samples: "lockstep" (a function of seed, epoch and position), or "torch" (torch's own
            permutation, for comparisons).
        keep_global_batch: when a run resumes with another number of ranks, keep the samples of each step: ranks
            accumulate more or fewer micro-batches. False: keep ``batch_size`` and ``accumulate_grad_batches`` of each
            rank.
        balance: give each rank as many samples of a global batch as its measured speed and memory allow, under "ddp"
            and "fsdp". The global batch and its gradient do not change.
        compile: compile the module's layers by ``torch.compile`` during each call: True, or a dict of its arguments
            ("mode", "fullgraph", "dynamic", "backend", "options") and "blocks" (True: the repeated blocks, the default
            on several ranks; False: the whole module, the default on one; or classes of layers).
        non_finite: reaction to a loss or gradient that is NaN or infinite. "protect": a warning names the first such
            step, and the fit raises `NonFiniteError` once weights are not finite. "skip": all ranks skip the update.
            "stop": the fit ends before the update. Both wait for the device in each step. "ignore": the fit continues.
            Weights that are not finite are never saved.
        record: "hashes": write 64 bits of the gradients and 64 bits of the weights of each step to the file
            step-hashes.bin in the folder of the checkpoints (docs/replay.md). None: nothing is recorded.
        hang_timeout: time, in seconds or as a timedelta, after which a wait of ranks for others is reported: which rank
            waits where, and what the others do. None: never.
        hang_kill: time, in seconds or as a timedelta, after which such a run is ended; if ranks have provably diverged,
            it is ended at once. None: never.
        **others: flags of Lightning 0.4 to 1.9, translated with a warning (``names/old_flags.py``); any other flag is
            an error.

    Raises:
        MisconfigurationException: an argument has a wrong value, or arguments contradict each other.
        TypeError: there is no such flag.

    Example::

        trainer = Trainer(max_epochs=3, devices=2)
        result = trainer.fit(model, train_loader, val_loader)
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: Sequence[Callback] | Callback | None = None,
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
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
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
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike[str] | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        order: str = "lockstep",
        keep_global_batch: bool = True,
        balance: bool = False,
        compile: bool | Mapping[str, Any] = False,
        non_finite: NonFinite = "protect",
        record: str | None = None,
        hang_timeout: float | timedelta | None = 60.0,
        hang_kill: float | timedelta | None = 1800.0,
        **others: Never,
    ) -> None:
        variables = locals()
        warn_of_untested_torch()
        flags = {name: variables[name] for name in FLAGS}
        flags.update(flags_of(flags, FLAGS))  # PL_TRAINER_... variables fill flags that were not given
        unknown: dict[str, Any] = {**others}  # Never: type checkers report a misspelt flag
        callbacks, self._resume_from = flags["callbacks"], None
        if may_have_old_flags(flags, unknown):
            # not at the top: the table of old flags is long, and most scripts use none
            from lockstep.names.old_flags import old_flags_of, translate

            old = old_flags_of(flags, unknown)
            refuse_unknown_flags(unknown, FLAGS)
            if old:
                today = translate(old, flags, FLAGS)
                flags.update(today.flags)
                callbacks, self._resume_from = today.with_callbacks(callbacks), today.resume
        self.barebones = strip(flags)
        self._given_flags = dict(flags)
        refuse_unsupported_flags(flags["model_registry"])
        config = config_of(flags)
        for name in ("accelerator", "strategy", "profiler"):
            check_not_lightnings(f"Trainer({name}=...)", flags[name])
        found = sort_plugins(flags["plugins"], flags["precision"], getattr(flags["strategy"], "plugins", ()))
        self._cluster = found.cluster
        strategy, devices = flags["strategy"], flags["devices"]
        dealt = is_placed_by_cluster(self._cluster)
        # before `find_accelerator` uses CUDA, which reads the order of devices from the environment only once
        number_devices(dealt or flags["accelerator"] == "cpu")
        self.accelerator = find_accelerator(flags["accelerator"])
        kind = self.accelerator.device_type
        alone = drives_all_devices(strategy)
        self._node_devices, self._devices_asked = node_devices(self.accelerator, devices, dealt, alone)
        self._num_nodes_asked = nodes(flags["num_nodes"])
        placement = self._placement()
        check_devices(devices, placement.cluster)
        made = make_strategy(strategy, placement.world.size, is_interactive(placement))
        together = len(self._node_devices) if made.drives_all_devices else 1
        made.sync_batchnorm = synchronizes_batchnorm(flags["sync_batchnorm"], together)
        if found.checkpoint_io is not None:
            made.checkpoint_io = found.checkpoint_io
        self._precision = found.precision or make_precision(flags["precision"], kind)
        self._connect(made)
        if config.balance:
            load("services", "balance").check(made)
        self._launch = launcher(made.launcher, placement, strategy)
        self._spawns = self._launch is not directly and made.launcher in ("spawn", "fork")
        loggers = make_loggers(flags["logger"], config)
        own_callbacks = make_callbacks(
            callbacks,
            flags["enable_checkpointing"],
            flags["enable_progress_bar"],
            flags["enable_model_summary"],
            config,
        )
        if made.planned is not None:
            own_callbacks = [load("services", "prediction of a plan")(*made.planned), *own_callbacks]
        if placement.world.is_zero:
            check_root(config, flags["logger"], own_callbacks)
        apply_to_process(config, kind)
        announce_device(kind, len({*self._node_devices}) > 1 or placement.world.num_nodes > 1)
        self.session = Session(
            trainer=self,
            connect=self._begin_call,
            config=config,
            strategy=made,
            profiler=make_profiler(flags["profiler"]) or PassThroughProfiler(),
            cluster=self._cluster,
            loggers=loggers,
            base_callbacks=own_callbacks,
            callbacks=own_callbacks,
            chooses=isinstance(strategy, str) and strategy.lower() == "auto",
        )
        self._user_ckpt_path = None
        self.fit_loop = FitLoop(self.session, epochs_by_default=flags["max_epochs"] is None)
        self.validate_loop = EvaluationLoop(self.session, RunningStage.VALIDATING)
        self.test_loop = EvaluationLoop(self.session, RunningStage.TESTING)
        self.predict_loop = EvaluationLoop(self.session, RunningStage.PREDICTING)

    def _begin_call(self) -> None:
        """Determine this process's rank, and attach the Trainer to the module and the data module."""
        if self._spawns:  # in a process that was started for the call, further calls run directly
            self._launch, self._spawns = directly, False
        self._connect(self.strategy)
        self.session.module.trainer = self
        if self.datamodule is not None:
            self.datamodule.trainer = self

    def _connect(self, strategy: Strategy) -> None:
        """Pass the rank and the device of this process to the strategy."""
        world = self._placement().world
        device = device_of(self._node_devices, world.local_rank, world.local_size)
        # a node may have more devices than ranks, where a cluster dealt them out
        ours = len(self._node_devices) if strategy.drives_all_devices else world.local_size
        strategy.devices = self._node_devices[:ours]
        strategy.accelerator_backend = self.accelerator.process_group_backend
        strategy.connect(world, device, self._precision)
        rank_zero_only.rank = world.rank

    def _placement(self) -> Placement:
        """Return the place of this process among the ranks, from the user's cluster plugin or the environment."""
        return here(self._devices_asked, self._num_nodes_asked, self._cluster)

    # -- what users call -----------------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> Result:
        """Train ``model``.

        Args:
            model: module to train.
            train_dataloaders: a loader, a dict or list of loaders, or a LightningDataModule; None: the module's or data
                module's own ``train_dataloader()``.
            val_dataloaders: a loader or a list of loaders; None: ``val_dataloader()``, if it is defined.
            datamodule: data module, in place of loaders.
            ckpt_path: checkpoint to resume from; "last": the newest one, if there is one; "best": the best one.
            weights_only: False: unpickle any object in the checkpoint, which may run code; only for files you trust.

        Returns:
            the `Result`, the same on every rank: why the fit ended, its metrics, epochs and steps.

        Raises:
            MisconfigurationException: module, loaders and flags do not fit together, or there is no "best" checkpoint.
            CorruptCheckpoint: the checkpoint is truncated, altered, or not a checkpoint.
            FileNotFoundError: there is no file or folder `ckpt_path`.
            NonFiniteError: weights are NaN or infinite, with ``non_finite="protect"``.

        Example::

            result = trainer.fit(model, train_loader, val_loader, ckpt_path="last")
            print(result.stopped, result.metrics)
        """
        self._attach(TrainerFn.FITTING, model, {"train": train_dataloaders, "val": val_dataloaders}, datamodule)
        path = self._checkpoint(self._resume_from if ckpt_path is None else ckpt_path, model_given=True)
        if self._spawns:
            return self._hand_over(self.fit_loop, path, weights_only)
        return self._launch(self.fit_loop.run, path, weights_only)

    def plan(
        self,
        model: LightningModule,
        train_dataloaders: object = None,
        *,
        datamodule: LightningDataModule | None = None,
        batch: object = None,
        goal: Literal["speed", "memory"] = "speed",
        blocks: Sequence[str] = (),
    ) -> Planned:
        """Predict the memory and the time of a training step of ``model``, for each way to use this Trainer's devices.

        Nothing is trained. If the model fits, some steps are measured on this device and undone; otherwise the
        times come from a cost model.

        Args:
            model: module to plan for; it is unchanged after the call.
            train_dataloaders: loaders to take a batch from, as in :meth:`fit`.
            datamodule: data module, in place of loaders.
            batch: a batch of one device, in place of both.
            goal: "speed", or "memory" for the least memory on a device.
            blocks: names of submodules that are the blocks of a chain; by default they are detected.

        Returns:
            a table (``print(plan)``) with the choice and its reason. ``plan.save("plan.yaml")`` writes it to a file
            for ``Trainer(strategy="plan.yaml")``.

        Raises:
            MisconfigurationException: manual optimization, no batch, or a step whose control flow depends on values.

        Example::

            print(Trainer(accelerator="cpu", devices=2).plan(model, loader))
        """
        plan_fit = load("services", "trainer.plan")
        self._attach(TrainerFn.FITTING, model, {"train": train_dataloaders}, datamodule)
        found: Planned = plan_fit(self, batch, goal, blocks)
        return found

    def verify(
        self,
        model: LightningModule,
        train_dataloaders: object = None,
        *,
        datamodule: LightningDataModule | None = None,
        devices: int | None = None,
        steps: int = 5,
    ) -> Verified:
        """Check that several ranks train the same model as one process, as ``lockstep verify`` does for a script.

        Copies of the model train in separate processes, on this machine's CPU.

        Args:
            model: module to train; it is unchanged after the call.
            train_dataloaders: loaders, as in :meth:`fit`.
            datamodule: data module, in place of loaders.
            devices: number of ranks; default: this Trainer's, at least 2.
            steps: optimizer steps to compare.

        Returns:
            a certificate, which is true if all values agree. Otherwise it names the first difference and its cause.

        Raises:
            MisconfigurationException: the module, its data or a flag of the Trainer cannot be pickled.

        Example::

            certificate = Trainer(strategy="ddp", devices=2).verify(model, loader)
            assert certificate, certificate
        """
        verify_fit = load("services", "trainer.verify")
        devices = max(2, self.world_size) if devices is None else devices
        certificate: Verified = verify_fit(self._given_flags, model, train_dataloaders, datamodule, devices, steps)
        return certificate

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: object = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a module on the validation data.

        Args:
            model: module to evaluate; None: the module of the last call, with its best checkpoint.
            dataloaders: a loader or a list of loaders, or a LightningDataModule.
            ckpt_path: checkpoint whose weights to load first: a path, "best" or "last".
            verbose: print the metrics.
            datamodule: data module, in place of loaders.
            weights_only: as in :meth:`fit`.

        Returns:
            a list with a dict for each loader, from the names of its logged metrics to their values, reduced over the
            ranks; the same on every rank.

        Raises:
            MisconfigurationException: module, loaders and flags do not fit together; no module was passed and there was
                no earlier call; a "best" or "last" checkpoint does not exist; or a fit is running its epochs.
            CorruptCheckpoint: the checkpoint is truncated, altered, or not a checkpoint.
            FileNotFoundError: there is no file or folder `ckpt_path`.

        Example::

            (metrics,) = trainer.validate(model, val_loader)
        """
        given = self._attach(TrainerFn.VALIDATING, model, {"val": dataloaders}, datamodule)
        path = self._checkpoint(ckpt_path, model_given=given)
        return self._call(self.validate_loop, path, verbose, True, weights_only)

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: object = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a module on the test data. Arguments and result are those of :meth:`validate`.

        Errors are those of :meth:`validate` too. The test data is that of ``test_dataloader()`` if no loaders are
        passed.
        """
        given = self._attach(TrainerFn.TESTING, model, {"test": dataloaders}, datamodule)
        path = self._checkpoint(ckpt_path, model_given=given)
        return self._call(self.test_loop, path, verbose, True, weights_only)

    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: object = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Run ``predict_step`` on every batch of the prediction data.

        Args:
            model: module to use; None: the module of the last call, with its best checkpoint.
            dataloaders: a loader or a list of loaders, or a LightningDataModule.
            datamodule: data module, in place of loaders.
            return_predictions: False: discard the predictions, for callbacks such as BasePredictionWriter.
            ckpt_path: checkpoint whose weights to load first: a path, "best" or "last".
            weights_only: as in :meth:`fit`.

        Returns:
            a list of what ``predict_step`` returned for each batch; with several loaders a list of such lists. It has
            the batches of this rank; those of all ranks if the call has started the processes ("ddp_spawn",
            "ddp_notebook", "ddp_fork").

        Raises:
            MisconfigurationException: as in :meth:`validate`.
            CorruptCheckpoint, FileNotFoundError: as in :meth:`validate`.

        Example::

            predictions = torch.cat(trainer.predict(model, loader))  # predict_step returns (batch, classes)
        """
        given = self._attach(TrainerFn.PREDICTING, model, {"predict": dataloaders}, datamodule)
        path = self._checkpoint(ckpt_path, model_given=given)
        return self._call(self.predict_loop, path, False, return_predictions is not False, weights_only)

    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool | None = None,
        storage_options: object = None,
        *,
        trainable_only: bool = False,
    ) -> None:
        """Save the state of the run as a checkpoint. Call it on every rank.

        Args:
            filepath: path of the checkpoint. An existing file is replaced atomically.
            weights_only: omit what only a resume needs.
            storage_options: options of the CheckpointIO in ``Trainer(plugins=...)``; the default one has none.
            trainable_only: omit weights that have been frozen since the start of the fit and have not changed. The
                file then has, for example, an adapter, its optimizer, the rest that a resume needs, and a hash of the
                omitted weights, so that loading it with others is an error. Frozen weights that change, such as a
                target network's, are in the file.

        Raises:
            MissingAttribute: no fit has set up a module, or its state is in other processes.
            TypeError: the CheckpointIO has no `storage_options`.
            NonFiniteError: the weights are not finite; nothing was written.
            OSError: this rank cannot write its file; the other ranks then raise a RuntimeError.
        """
        call = f"trainer.save_checkpoint({os.fspath(filepath)!r})"
        session = self._saved_session(call)
        if session is not self.session:
            if weights_only is False or trainable_only:
                raise MissingAttribute(f"{call}: {STAYED_THERE}")
            if not weights_only:
                warn_once(f"{call} writes the weights alone: {STAYED_THERE}", key=STAYED_THERE)
            state.save(session, filepath, True, storage_options)
            return
        if self.session.fit.progress.runs and not weights_only:
            warn_once(SAVED_WITHIN.format(hook=self.session.results.hook[0]), key="saved within a batch")
        early = self.session.hooks.before_own("on_train_batch_end")
        if early:
            own = f"{type(self.session.module).__name__}.on_train_batch_end"
            warn_once(
                f"trainer.save_checkpoint was called in {early}, before {own} has run for this batch. A fit that "
                "resumes from this checkpoint skips that hook of the module for the batch. If the hook changes "
                "anything, save in the hook, or derive the callback from lockstep.callbacks.Checkpoint, so that the "
                "callback runs after the module."
            )
        state.save(self.session, filepath, bool(weights_only), storage_options, trainable_only=trainable_only)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        max_shard_size: int | str = "5GB",
        *,
        model: nn.Module | None = None,
        tokenizer: object = None,
    ) -> None:
        """Write the model of the last call as a folder that ``from_pretrained`` reads. Call it on every rank.

        For a model of peft the folder has the adapters alone, for ``PeftModel.from_pretrained``.

        Args:
            folder: folder to make, which all ranks can see. Weights in it are replaced.
            max_shard_size: maximum size of a file: bytes, or text such as "5GB".
            model: submodule to write; None: the only model of transformers in the module, or the only one loaded by
                `lockstep.load_pretrained`.
            tokenizer: tokenizer to write too: one of transformers, or a folder with one. None: copy the tokenizer's
                files from the folder that the model was loaded from.

        Raises:
            MissingAttribute: no fit has set up a module, or it is in other processes.
            MisconfigurationException: `max_shard_size` is not a size, `model` is not a submodule of the module, or the
                choice is not unique.
            ModuleNotFoundError: safetensors is not installed.
        """
        strategy = self._saved_session(f"trainer.save_pretrained({os.fspath(folder)!r})").strategy
        from lockstep.checkpoint import export  # few runs write one

        prefix, found = export.find_model(strategy.module, model)
        # One whole tensor at a time, and ranks take turns to write: a sharded model need not fit on any of them.
        values = itertools.chain(((n, value) for n, value, _ in strategy.whole_parameters()), strategy.whole_buffers())
        if export.is_of_peft(found):
            export.write_adapter(folder, values, prefix, found, tokenizer)
        else:
            export.write(folder, export.named_as_in_files(found, prefix, values), found, max_shard_size, tokenizer)

    def _saved_session(self, call: str) -> Session:
        """Return the session to save: the Trainer's own, or a copy with the weights that spawned processes returned."""
        if self._spawns and self.session.has_returned:
            from lockstep.loop import spawn_results  # spawned ranks alone have results to bring here

            return spawn_results.local_session(self.session)
        if self._spawns:
            raise MissingAttribute(
                f"{call}: there are no weights to save. Calls of this Trainer run in other processes, which return the "
                "weights when they end without an error. Save after such a call, or in a hook."
            )
        if not self.session.has("hooks") or self.strategy.module is None:
            raise MissingAttribute(
                f"{call}: there is nothing to save before the first fit has set up its module (a copy of a Trainer "
                "starts without one)."
            )
        if self.strategy.absent:
            self.strategy.check_present(call)
        return self.session

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create modules in the ``with`` block directly on this rank's device, and in the run's precision.

        Args:
            empty_init: leave parameters uninitialized, because a checkpoint is loaded afterwards. Under FSDP and
                ModelParallelStrategy they also have no memory (the meta device) until they are sharded; then each
                layer's ``reset_parameters`` initializes them.

        Example::

            with trainer.init_module():
                model = Classifier()
        """
        dtype = getattr(self.strategy.precision, "dtype", None)
        with creating(self.strategy.root_device, dtype, bool(empty_init), self.strategy.cuts_parameters):
            yield

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress bar."""
        self.session.print(*args, **kwargs)

    # -- calls ---------------------------------------------------------------------------------------------

    def _attach(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        given: dict[str, Any],
        datamodule: LightningDataModule | None,
    ) -> bool:
        """Check and store a call's module and data. Return True if the user passed a module."""
        if self.fit_loop.is_training:
            raise MisconfigurationException(
                f"trainer.{fn}() in a hook of trainer.fit while its epochs run would overwrite the state of the fit. "
                "Call it after the fit or in `on_train_end`. During an epoch the fit validates by itself "
                "(val_dataloaders=, val_check_interval=)."
            )
        self.state.fn = fn
        first = next(iter(given))
        if isinstance(given[first], LightningDataModule):
            datamodule, given[first] = given[first], None
        if datamodule is not None and any(value is not None for value in given.values()):
            raise MisconfigurationException(f"trainer.{fn}(): pass loaders or `datamodule=`, not both.")
        if datamodule is not None:
            check_not_lightnings(f"trainer.{fn}(datamodule=...)", datamodule)
            if isinstance(datamodule, LightningDataModule):
                check_constructed(f"trainer.{fn}(datamodule=...)", datamodule, "prepare_data_per_node")
        module: Any = self.lightning_module if model is None else unwrapped(model)
        check_kind(f"trainer.{fn}(model)", module, LightningModule, "LightningModule")
        check_constructed(f"trainer.{fn}(model)", module, "_automatic_optimization")
        if self._launch is not directly:  # an error in this process is clearer than one in each that it would start
            check_steps(module, fn)
        self.session.module = module
        self.session.keep_callbacks()
        self.datamodule = self.datamodule if datamodule is None and model is None else datamodule
        self.loaders = RunLoaders(given, self.datamodule, module)
        self.session.fit.given = None
        for loop in (self.fit_loop.validation, self.validate_loop, self.test_loop, self.predict_loop):
            loop.given = None
        self.enable_validation = (
            fn is TrainerFn.FITTING
            and self.config.limit_val_batches != 0
            and self.loaders.defined("val")
            and is_overridden("validation_step", module, LightningModule)
        )
        return model is not None

    def _checkpoint(self, path: str | os.PathLike[str] | None, *, model_given: bool) -> str | None:
        """Return the path of the checkpoint to load, from ``ckpt_path`` or else ``trainer.ckpt_path``."""
        return state.find(self.session, self._user_ckpt_path if path is None else path, model_given=model_given)

    def _call(self, loop: FitLoop | EvaluationLoop, *args: object) -> Any:
        return self._hand_over(loop, *args) if self._spawns else self._launch(loop.run, *args)

    def _hand_over(self, loop: FitLoop | EvaluationLoop, *args: object) -> Any:
        """Run a loop in spawned or forked processes, and apply the results to this process."""
        from lockstep.loop import spawn_results  # as above

        session = self.session
        session.has_returned = False
        call = spawn_results.call if self.strategy.launcher == "spawn" else spawn_results.call_in_copy(session)
        return spawn_results.take_over(session, self._launch(call, session, loop, *args))

    def __getstate__(self) -> dict[str, Any]:
        return kept(self)


FLAGS = defaults_of(Trainer.__init__)
"""Every flag in the order of the signature, and its default."""
