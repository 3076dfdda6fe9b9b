"""Trainer: the parts of a run put together; the loops are in ``loop/``."""

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
from lockstep.checkpoint import export
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
    Plugins,
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
    refuse_unknown_flags,
    refuse_what_is_not_there,
    strip,
    synchronizes_batchnorm,
)
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.engines.table import drives_all_devices, make_strategy
from lockstep.ground.accelerators import Accelerator, find_accelerator
from lockstep.ground.device import creating
from lockstep.ground.errors import MisconfigurationException, NotThere
from lockstep.ground.extensions import load
from lockstep.ground.methods import kept
from lockstep.ground.rank import rank_zero_only, warn_once
from lockstep.ground.torch_support import warn_of_untried_torch
from lockstep.ground.types import Planned, RunningStage, TrainerFn, Verified
from lockstep.launch.environment import flags_of, number_devices
from lockstep.launch.topology import dealt_out, directly, here, is_interactive, launcher
from lockstep.loggers.base import Logger
from lockstep.loop import spawn_results, state
from lockstep.loop.call import check_steps
from lockstep.loop.compiled import unwrapped
from lockstep.loop.ending import Result
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.fit import FitLoop
from lockstep.loop.hooks import is_overridden
from lockstep.loop.session import RunLoaders, Session
from lockstep.module import LightningModule
from lockstep.names.old_flags import old_flags_of, translate
from lockstep.precision.formats import make_precision
from lockstep.profilers.base import PassThroughProfiler, Profiler

STAYED_THERE = (
    "the call ran in processes of its own, where the optimizers' states and all else that a resume needs have stayed. "
    "Save by ModelCheckpoint, or in a hook, to resume; give weights_only=True for the weights."
)

SAVED_WITHIN = (
    "trainer.save_checkpoint in `{hook}`, while a training batch runs: a run that goes on from this file plays the "
    "batch again, and with it its window. Random numbers that they have drawn by now are others then, a step of the "
    "optimizer that has been made counts twice, and so do buffers and logged values of a window of one batch. Save in "
    "`on_train_batch_end`, or by ModelCheckpoint(every_n_train_steps=...)."
)


class Trainer(Attributes):
    """Trains, validates, tests and uses a LightningModule, on one process or on many.

    Every argument is checked here, before anything is started.

    Args:
        accelerator: "auto" (one if there is any), "gpu", "cpu", "cuda", "mps", "xpu", "tpu", the name of any other
            device that torch has, or an Accelerator.
        strategy: "auto" (one device: as it is; several: "ddp", in a notebook "ddp_notebook"), "ddp" (this script once
            per device), "ddp_spawn" and "ddp_notebook" (the call, in fresh processes), "ddp_fork" (the call, in copies
            of this process), "dp" (one process for all devices), or a Strategy object; all: ``engines/table.py``.
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
        overfit_batches: train and validate on the same few batches in every epoch: so many (int), or this fraction
            (float); without shuffling.
        val_check_interval: validate every so many batches (int), after this fraction of an epoch (float), or when so
            much time has passed since the last validation ("DD:HH:MM:SS", a timedelta, or its arguments as a dict).
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
        benchmark: let cuDNN try its algorithms for the sizes at hand; off where ``deterministic`` is on.
        inference_mode: evaluate under ``torch.inference_mode`` (else ``no_grad``).
        use_distributed_sampler: share loaders out over the ranks; False: take them as they are.
        profiler: measure where the time goes: "simple", "advanced", "pytorch", or a Profiler.
        detect_anomaly: look for NaN in backward, with the forward call that made it; slow.
        barebones: turn off everything that costs time beside the steps, ``self.log`` included.
        plugins: a Precision, a ClusterEnvironment that says which rank this process is, or a CheckpointIO that writes
            and reads the checkpoints; one or several.
        sync_batchnorm: let BatchNorm take its statistics over all ranks while training.
        reload_dataloaders_every_n_epochs: ask the loader hooks for new loaders every n epochs; 0: never.
        default_root_dir: where logs and checkpoints go; default: the working directory.
        enable_autolog_hparams: send the module's and data module's hyperparameters to the loggers.
        model_registry: only None.
        order: "lockstep" (the order of data is a function of seed, epoch and position), or "torch" (torch's own
            permutation, for comparisons).
        keep_global_batch: a run that goes on with another number of ranks keeps the samples of each step: the ranks
            accumulate more or fewer micro-batches. False: ``batch_size`` and ``accumulate_grad_batches`` stay as they
            are on each rank.
        balance: let each rank take as many samples of a global batch as its measured speed and memory allow, under
            "ddp" and "fsdp"; the global batch and its gradient stay what they are.
        compile: compile the module's layers by ``torch.compile`` for the length of each call: True, or a dict of its
            arguments ("mode", "fullgraph", "dynamic", "backend", "options") and "blocks" (True: the repeated blocks, as
            by default on several ranks; False: the whole module, as by default on one; or classes of layers).
        non_finite: what follows from a loss or gradient that is NaN or infinite. "protect": the fit ends with a
            `NonFiniteError` where weights have become so; while they are finite, a warning names the first such step.
            "skip": the update is left out, on all ranks; "stop": the fit ends before it; both wait for the device in
            each step. "ignore": the fit goes on. Weights that are not finite are never saved.
        hang_timeout: how long a rank may wait for others, in seconds or as a timedelta, before it is told which rank
            waits where, and what the others do. None: nobody is told.
        hang_kill: the same, before the run is ended; one whose ranks provably went different ways ends at once. None:
            it goes on.
        **others: flags of earlier years, translated with a warning (``names/old_flags.py``); others are refused.

    Raises:
        MisconfigurationException: for a value or a combination that cannot work.

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
        hang_timeout: float | timedelta | None = 60.0,
        hang_kill: float | timedelta | None = 1800.0,
        **others: Never,
    ) -> None:
        variables = locals()
        warn_of_untried_torch()
        flags = {name: variables[name] for name in FLAGS}
        flags.update(flags_of(flags, FLAGS))
        unknown: dict[str, Any] = {**others}  # for type checkers there are none: they tell of a misspelt flag
        old = old_flags_of(flags, unknown)
        refuse_unknown_flags(unknown, FLAGS)
        callbacks, self._resume_from = flags["callbacks"], None
        if old:
            today = translate(old, flags, FLAGS)
            flags.update(today.flags)
            callbacks, self._resume_from = today.with_callbacks(callbacks), today.resume
        self.barebones = strip(flags)
        self._given_flags = dict(flags)
        refuse_what_is_not_there(flags["model_registry"])
        config = config_of(flags)
        for name in ("accelerator", "strategy", "profiler"):
            check_not_lightnings(f"Trainer({name}=...)", flags[name])
        found = sort_plugins(flags["plugins"], flags["precision"], getattr(flags["strategy"], "plugins", ()))
        self._cluster = found.cluster
        strategy, devices = flags["strategy"], flags["devices"]
        dealt = dealt_out(self._cluster)
        number_devices(dealt or flags["accelerator"] == "cpu")
        self.accelerator = find_accelerator(flags["accelerator"])
        kind = self.accelerator.device_type
        alone = drives_all_devices(strategy)
        self._node_devices, self._devices_asked = node_devices(self.accelerator, devices, dealt, alone)
        self._num_nodes_asked = nodes(flags["num_nodes"])
        placement = self._placement()
        check_devices(devices, placement.cluster)
        made = self._make_strategy(flags, placement, found)
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
        self._ckpt_wanted = None
        self.fit_loop = FitLoop(self.session, epochs_by_default=flags["max_epochs"] is None)
        self.validate_loop = EvaluationLoop(self.session, RunningStage.VALIDATING)
        self.test_loop = EvaluationLoop(self.session, RunningStage.TESTING)
        self.predict_loop = EvaluationLoop(self.session, RunningStage.PREDICTING)

    def _begin_call(self) -> None:
        """In the process in which a call runs: find out which rank it is, and tie the module to this Trainer."""
        if self._spawns:  # this is a process that was started for the call: there is nothing more to be launched
            self._launch, self._spawns = directly, False
        self._connect(self.strategy)
        self.session.module.trainer = self
        if self.datamodule is not None:
            self.datamodule.trainer = self

    def _connect(self, strategy: Strategy) -> None:
        """Tell the strategy which rank this process is."""
        world = self._placement().world
        device = device_of(self._node_devices, world.local_rank, world.local_size)
        # a node may have more devices than ranks, where a cluster dealt them out
        ours = len(self._node_devices) if strategy.drives_all_devices else world.local_size
        strategy.devices = self._node_devices[:ours]
        strategy.accelerator_backend = self.accelerator.process_group_backend
        strategy.connect(world, device, self._precision)
        rank_zero_only.rank = world.rank

    def _make_strategy(self, flags: dict[str, Any], placement: Placement, plugins: Plugins) -> Strategy:
        """The strategy that the flags name, with what other flags and plugins say of it."""
        made = make_strategy(flags["strategy"], placement.world.size, is_interactive(placement))
        together = len(self._node_devices) if made.drives_all_devices else 1
        made.sync_batchnorm = synchronizes_batchnorm(flags["sync_batchnorm"], together)
        if plugins.checkpoint_io is not None:
            made.checkpoint_io = plugins.checkpoint_io
        return made

    def _placement(self) -> Placement:
        """This process among the ranks, by the user's cluster plugin or by what the environment tells."""
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
        """Predict memory and seconds of a step under each way to train ``model`` on this Trainer's devices.

        Nothing is trained. Where the model fits, some steps are measured on this device, and put back; else seconds
        come from a cost model.

        Args:
            model: what is to be trained; after the call it is as before.
            train_dataloaders: where the batch comes from.
            datamodule: in place of loaders.
            batch: in place of both: a batch of one device.
            goal: "speed", or "memory" for the least on a device.
            blocks: names of submodules that are blocks of a chain; by default they are found.

        Returns:
            a table (``print(plan)``) with a choice and its reason, which ``plan.save("plan.yaml")`` keeps for
            ``Trainer(strategy="plan.yaml")``.

        Raises:
            MisconfigurationException: manual optimization, no batch, a step whose control flow depends on values.

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
        """Say whether several ranks train what one process trains, as ``lockstep verify`` does for a script.

        Copies of the model train in processes of their own, on this machine's CPU.

        Args:
            model: what is to be trained; it stays as it is.
            train_dataloaders: what `fit` takes.
            datamodule: in place of loaders.
            devices: ranks; by default this Trainer's, at least 2.
            steps: optimizer steps that are compared.

        Returns:
            a certificate: true where all is alike; else it names what differs first, and why.

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
        """Measure a module on the validation data; gives the metrics of each loader, and prints them.

        Args:
            model: what to measure; None: the module of the last call, with its best checkpoint.
            dataloaders: a loader or a list of loaders, or a LightningDataModule.
            ckpt_path: weights to load first: a path, "best" or "last".
            verbose: print the metrics.
            datamodule: in place of loaders.
            weights_only: as of :meth:`fit`.
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
        """Measure a module on the test data; arguments as for :meth:`validate`."""
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
        """Run ``predict_step`` over the data.

        Args:
            model: what to use; None: the module of the last call, with its best checkpoint.
            dataloaders: a loader or a list of loaders, or a LightningDataModule.
            datamodule: in place of loaders.
            return_predictions: False to keep nothing.
            ckpt_path: weights to load first: a path, "best" or "last".
            weights_only: as of :meth:`fit`.

        Returns:
            what ``predict_step`` returned for each batch of this rank, and of all ranks where the call started them
            ("ddp_spawn", "ddp_notebook", "ddp_fork"); a list for each loader if there are several.
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
        """Write the run to a file; call it on every rank.

        Args:
            filepath: replaced as a whole, or not at all.
            weights_only: leave out what only a resume needs.
            storage_options: for a CheckpointIO of your own (``Trainer(plugins=...)``); the default one has none.
            trainable_only: leave out weights that are frozen since the fit began and have not changed: the file has
                an adapter, say, its optimizer and what a resume needs, and a hash of the weights that it belongs to,
                by which loading refuses others. Frozen weights that change (a target network's) are in the file.
        """
        call = f"trainer.save_checkpoint({os.fspath(filepath)!r})"
        session = self._saved_session(call)
        if session is not self.session:
            if weights_only is False or trainable_only:
                raise NotThere(f"{call}: {STAYED_THERE}")
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
                f"trainer.save_checkpoint in {early}: {own} comes behind it, and a run that goes on from this file "
                "does not call it for this batch. If it changes anything, save in it, or derive the callback from "
                "lockstep.callbacks.Checkpoint, which comes behind the module."
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
        """Write the model of the last call as a folder that ``from_pretrained`` reads; call it on every rank.

        Of a model of peft's it is peft's folder, with the adapters alone, for ``PeftModel.from_pretrained``.

        Weights are gathered tensor by tensor, and each rank writes its turn of the parts: none has the whole model
        where the strategy shards it. All ranks have to see the folder.

        Args:
            folder: to make; weights that are there are replaced.
            max_shard_size: of a part: bytes, or "5GB".
            model: which of the module's layers is meant; None: the only model of transformers, or the only one that
                `lockstep.load_pretrained` began.
            tokenizer: to be written, too: a tokenizer of transformers, or a folder that holds one. None: files of the
                folder that the model began with are copied.
        """
        strategy = self._saved_session(f"trainer.save_pretrained({os.fspath(folder)!r})").strategy
        prefix, found = export.find_model(strategy.module, model)
        values = itertools.chain(((n, value) for n, value, _ in strategy.whole_parameters()), strategy.whole_buffers())
        if export.is_of_peft(found):
            export.write_adapter(folder, values, prefix, found, tokenizer)
        else:
            export.write(folder, export.named_as_in_files(found, prefix, values), found, max_shard_size, tokenizer)

    def _saved_session(self, call: str) -> Session:
        """The session whose module can be saved now: this process's, or one of what came back from others."""
        if self._spawns and self.session.came_back:
            return spawn_results.session_here(self.session)
        if self._spawns:
            raise NotThere(
                f"{call}: no weights have come back: calls of this Trainer run in processes of their own, and bring "
                "them back when they end without an error. Call it after that, or in a hook."
            )
        if not self.session.has("hooks") or self.strategy.module is None:
            raise NotThere(
                f"{call}: there is nothing to save before the first fit has set up its module (a copy of a Trainer has "
                "set up nothing)."
            )
        if self.strategy.absent:
            self.strategy.check_present(call)
        return self.session

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make a module on this rank's device and in the run's precision, without a copy on the CPU first.

        Args:
            empty_init: leave parameters without their first values, for weights that a checkpoint brings. Under FSDP
                and ModelParallelStrategy they have no memory either (the meta device), until they are in shards; then
                each layer's ``reset_parameters`` gives them values.

        Example::

            with trainer.init_module():
                model = Classifier()
        """
        dtype = getattr(self.strategy.precision, "dtype", None)
        with creating(self.strategy.root_device, dtype, bool(empty_init), self.strategy.cuts_parameters):
            yield

    def print(self, *args: object, **kwargs: Any) -> None:
        """``print`` on rank 0 only, above the progress bar."""
        self.session.print(*args, **kwargs)

    # -- calls ---------------------------------------------------------------------------------------------

    def _refuse_within(self, fn: TrainerFn) -> None:
        if self.fit_loop.plays:
            raise MisconfigurationException(
                f"trainer.{fn}() in a hook of trainer.fit, whose epochs run: it would end what the fit goes on with. "
                "Call it behind the fit, or in `on_train_end`; within an epoch the fit validates by itself "
                "(val_dataloaders=, val_check_interval=)."
            )

    def _attach(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        given: dict[str, Any],
        datamodule: LightningDataModule | None,
    ) -> bool:
        """Take in module and data of a call; tells whether a module was given."""
        self._refuse_within(fn)
        self.state.fn = fn
        first = next(iter(given))
        if isinstance(given[first], LightningDataModule):
            datamodule, given[first] = given[first], None
        if datamodule is not None and any(value is not None for value in given.values()):
            raise MisconfigurationException(f"trainer.{fn}(): give loaders or `datamodule=`, not both.")
        if datamodule is not None:
            check_not_lightnings(f"trainer.{fn}(datamodule=...)", datamodule)
            if isinstance(datamodule, LightningDataModule):
                check_constructed(f"trainer.{fn}(datamodule=...)", datamodule, "prepare_data_per_node")
        module: Any = self.lightning_module if model is None else unwrapped(model)
        check_kind(f"trainer.{fn}(model)", module, LightningModule, "LightningModule")
        check_constructed(f"trainer.{fn}(model)", module, "_automatic_optimization")
        self._check_before_start(module, fn)
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

    def _check_before_start(self, module: LightningModule, fn: TrainerFn) -> None:
        """Refuse a module that cannot do the call before processes are started for it."""
        if self._launch is not directly:
            check_steps(module, fn)

    def _checkpoint(self, asked: str | os.PathLike[str] | None, *, model_given: bool) -> str | None:
        """The path of the checkpoint of a call: the call's, or else the one that ``trainer.ckpt_path`` was set to."""
        return state.find(self.session, self._ckpt_wanted if asked is None else asked, model_given=model_given)

    def _call(self, loop: spawn_results.Loop, *args: object) -> Any:
        return self._hand_over(loop, *args) if self._spawns else self._launch(loop.run, *args)

    def _hand_over(self, loop: spawn_results.Loop, *args: object) -> Any:
        """Run a loop in spawned or forked processes, and go on here as if it had run here."""
        session = self.session
        session.came_back = False
        call = spawn_results.call if self.strategy.launcher == "spawn" else spawn_results.call_in_copy(session)
        return spawn_results.take_over(session, self._launch(call, session, loop, *args))

    def __getstate__(self) -> dict[str, Any]:
        return kept(self)


FLAGS = defaults_of(Trainer.__init__)
"""Every flag in the order of the signature, and its default."""
