"""Attributes, the base class of Trainer with its public attributes, such as ``trainer.current_epoch``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.callbacks.progress.base import ProgressBar
from lockstep.config.compile import CompileOptions
from lockstep.config.objects import in_order
from lockstep.config.run import NonFinite, RunConfig, set_flag
from lockstep.data.combined import CombinedLoader
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.ground.agreement import ConsensusFlags
from lockstep.ground.errors import Inner, no_inner_part
from lockstep.ground.numbers import floats
from lockstep.ground.types import LRSchedulerConfig, RunningStage, TrainerState
from lockstep.loggers.base import Logger
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.fit import FitLoop
from lockstep.loop.hooks import Hooks
from lockstep.loop.logged_metrics import LoggedMetrics
from lockstep.loop.logging import LogCollector
from lockstep.loop.memory import memory_of
from lockstep.loop.optimizers import LightningOptimizer
from lockstep.loop.session import RunLoaders, Session
from lockstep.loop.state import collect
from lockstep.memory.meter import MemoryUse
from lockstep.module import LightningModule
from lockstep.precision.base import Precision
from lockstep.profilers.base import Profiler

T = TypeVar("T")


class SessionAttribute(Generic[T]):
    """Descriptor for a Trainer attribute that is stored in ``trainer.session`` under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Attributes, owner: type | None = None) -> T:
        if trainer is None:  # read from the class
            return cast(T, self)
        found: T = getattr(trainer.session, self._name, None)  # type: ignore[assignment]  # None before a call
        return found

    def __set__(self, trainer: Attributes, value: T) -> None:
        setattr(trainer.session, self._name, value)


class Removed:
    """Descriptor for a method that Lightning 2.0 removed. Access raises an error that names the replacement."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: object, owner: type) -> None:
        raise AttributeError(f"{owner.__name__}.{self._name}() was removed in Lightning 2.0: {self._instead}.")


def _loaders(given: object) -> Any:
    """Return the user's loaders unchanged, or the loaders inside a CombinedLoader, as in Lightning."""
    return given.iterables if isinstance(given, CombinedLoader) else given


class Attributes:
    """Readable attributes of :class:`lockstep.Trainer`, whose values are stored in its session and its loops."""

    session: Session
    fit_loop: FitLoop
    validate_loop: EvaluationLoop
    test_loop: EvaluationLoop
    predict_loop: EvaluationLoop
    _user_ckpt_path: str | None

    # Flags whose values `__getattr__` reads from the config. Type checkers do not see `__getattr__`, and so report
    # a misspelt name.
    fast_dev_run: int
    max_epochs: int
    min_epochs: int
    max_steps: int
    min_steps: int
    max_time: float | None
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    overfit_batches: int | float
    val_check_interval: int | float | timedelta
    check_val_every_n_epoch: int | None
    log_every_n_steps: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    detect_anomaly: bool
    non_finite: NonFinite
    reload_dataloaders_every_n_epochs: int
    enable_autolog_hparams: bool
    order: Literal["lockstep", "torch"]
    debug: Literal["collectives"] | None
    keep_global_batch: bool
    balance: bool
    compile: CompileOptions | None
    record: Literal["hashes"] | None
    hang_timeout: float | None
    hang_kill: float | None

    config = SessionAttribute[RunConfig]()
    strategy = SessionAttribute[Strategy]()
    profiler = SessionAttribute[Profiler]()
    base_callbacks = SessionAttribute[list[Callback]]()
    callbacks = SessionAttribute[list[Callback]]()
    state = SessionAttribute[TrainerState]()
    datamodule = SessionAttribute[LightningDataModule | None]()
    loaders = SessionAttribute[RunLoaders]()
    enable_validation = SessionAttribute[bool]()
    seed = SessionAttribute[int | None]()
    published = SessionAttribute[LoggedMetrics]()
    should_stop = SessionAttribute[bool]()
    received_sigterm = SessionAttribute[bool]()
    interruption = SessionAttribute[str | None]()
    hooks = SessionAttribute[Hooks]()
    results = SessionAttribute[LogCollector]()
    agreement = SessionAttribute[ConsensusFlags]()
    stop_flag = SessionAttribute[int]()
    interrupt_flag = SessionAttribute[int]()

    @property
    def lightning_module(self) -> LightningModule:
        """Module of the last ``fit``, ``validate``, ``test`` or ``predict``; None before the first call."""
        return vars(self.session).get("module")  # type: ignore[return-value]

    @lightning_module.setter
    def lightning_module(self, module: LightningModule) -> None:
        self.session.module = module

    def _flags(self) -> Mapping[str, object]:
        session = self.__dict__.get("session")
        return {} if session is None else session.config.__dataclass_fields__

    if not TYPE_CHECKING:
        from_argparse_args = Removed(
            "write Trainer(**{k: v for k, v in vars(args).items() if k in inspect.signature(Trainer).parameters}), "
            "or use LightningCLI"
        )
        add_argparse_args = Removed("add the flags that you need with parser.add_argument, or use LightningCLI")
        parse_argparser = Removed("write parser.parse_args(), or use LightningCLI")

        def __getattr__(self, name: str) -> Any:  # flags are read as trainer.max_epochs, trainer.log_every_n_steps, ...
            if name in self._flags():
                return getattr(self.config, name)
            if name in CONNECTORS and "session" in self.__dict__:
                made = CONNECTORS[name]
                return Inner(f"trainer.{name}", {part: partial(make, self) for part, make in made.items()})
            if name.startswith("_") and not name.startswith("__") and "session" in self.__dict__:
                raise no_inner_part(f"trainer.{name}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __setattr__(self, name: str, value: object) -> None:
            if name in self._flags():  # checked here as in the constructor
                name, value = "config", set_flag(self.config, name, value)
            object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        gone = {name for name, value in vars(Attributes).items() if isinstance(value, Removed)}
        return [*(name for name in super().__dir__() if name not in gone), *self._flags()]

    # -- where ---------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes, counted from 0."""
        return self.strategy.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process among the processes on its node, counted from 0."""
        return self.strategy.world.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this node, counted from 0."""
        return self.strategy.world.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.strategy.world.size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.strategy.world.num_nodes

    @property
    def num_devices(self) -> int:
        """Number of devices that the run uses on this node."""
        return len(self.device_ids)

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices that the run uses on this node; on the CPU, the node's local ranks."""
        devices = self.strategy.devices
        if self.strategy.root_device.type == "cpu" and not self.strategy.drives_all_devices:
            return list(range(self.strategy.world.local_size))  # a launcher may have started more than `devices`
        return [number if device.index is None else device.index for number, device in enumerate(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Arguments for a ``DistributedSampler`` of your own: ``num_replicas`` and ``rank``; None on one process.

        Example::

            sampler = DistributedSampler(dataset, **trainer.distributed_sampler_kwargs)
        """
        if self.world_size == 1:
            return None
        replicas = self.strategy.replicas
        return {"num_replicas": replicas.count, "rank": replicas.index}

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.strategy.world.rank == 0

    @property
    def precision(self) -> str:
        """Full name of the run's precision, such as "32-true"."""
        return str(self.strategy.precision.name)

    @property
    def precision_plugin(self) -> Precision:
        """Object that implements the run's precision."""
        return self.strategy.precision

    @property
    def scaler(self) -> Any:
        """``GradScaler`` of "16-mixed"; None under other precisions."""
        return self.strategy.precision.scaler

    @property
    def model(self) -> LightningModule:
        """Same object as ``lightning_module``, because strategies do not wrap the module."""
        return self.lightning_module

    # -- how far -------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Current epoch, counted from 0; after a fit the number of finished epochs.

        In a fit that resumes from the end of an epoch, ``on_train_start`` already reads the next epoch.
        """
        return self.fit_loop.current_epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far, summed over all optimizers."""
        return self.session.fit.progress.global_step

    @property
    def is_last_batch(self) -> bool:
        """True during the last training batch of an epoch."""
        return self.session.fit.progress.last

    @property
    def is_padding_batch(self) -> bool:
        """True during a padding batch: a rank without samples repeats another rank's batch. Exclude it from counts.

        Padding batches occur on several ranks if the last samples of an epoch do not suffice for all: under manual
        optimization, and under FSDP, also in evaluations, because all ranks must run each forward together.
        """
        return self.session.is_padding

    @property
    def training(self) -> bool:
        """True while a fit trains, but not during its validations."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, on: bool) -> None:
        self._stage(RunningStage.TRAINING, on)

    @property
    def validating(self) -> bool:
        """True during a validation, but not during the sanity check."""
        return self.state.stage is RunningStage.VALIDATING

    @validating.setter
    def validating(self, on: bool) -> None:
        self._stage(RunningStage.VALIDATING, on)

    @property
    def testing(self) -> bool:
        """True during a test."""
        return self.state.stage is RunningStage.TESTING

    @testing.setter
    def testing(self, on: bool) -> None:
        self._stage(RunningStage.TESTING, on)

    @property
    def predicting(self) -> bool:
        """True during a prediction."""
        return self.state.stage is RunningStage.PREDICTING

    @predicting.setter
    def predicting(self, on: bool) -> None:
        self._stage(RunningStage.PREDICTING, on)

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check."""
        return self.state.stage is RunningStage.SANITY_CHECKING

    @sanity_checking.setter
    def sanity_checking(self, on: bool) -> None:
        self._stage(RunningStage.SANITY_CHECKING, on)

    def _stage(self, stage: RunningStage, on: bool) -> None:
        if on:
            self.state.stage = stage
        elif self.state.stage is stage:
            self.state.stage = None

    @property
    def evaluating(self) -> bool:
        """True during a validation, a test or the sanity check."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C, SIGTERM or an error ended the last ``fit``, ``validate``, ``test`` or ``predict``."""
        return self.state.stopped and not self.state.finished

    # -- data ----------------------------------------------------------------------------------------------

    @property
    def num_training_batches(self) -> int | float:
        """Number of training batches of an epoch on each rank; infinite if the length is unknown."""
        feed = self.session.fit.feed
        return math.inf if feed is None else feed.num_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """List with the number of this rank's validation batches from each loader."""
        loop = self.validate_loop if self.state.fn == "validate" else self.fit_loop.validation
        return loop.num_batches_by_loader

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Number of batches that the sanity check runs from each validation loader; infinity means all."""
        steps = self.config.num_sanity_val_steps
        return math.inf if steps == -1 else steps

    @property
    def val_check_batch(self) -> int | float | None:
        """Number of training batches between two validations.

        Infinity if validations run at the end of an epoch; None if they run by time, or if the number is unknown yet.
        """
        return self.fit_loop.timing.every

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """List with the number of batches that the sanity check runs from each validation loader."""
        each = self.fit_loop.validation.num_batches_by_loader
        return [min(self.num_sanity_val_steps, batches) for batches in each]

    @property
    def num_test_batches(self) -> list[int | float]:
        """List with the number of this rank's test batches from each loader."""
        return self.test_loop.num_batches_by_loader

    @property
    def num_predict_batches(self) -> list[int | float]:
        """List with the number of this rank's prediction batches from each loader."""
        return self.predict_loop.num_batches_by_loader

    @property
    def train_dataloader(self) -> Any:
        """Training loader or loaders, as the user passed or returned them."""
        return _loaders(self.fit_loop.given)

    @property
    def val_dataloaders(self) -> Any:
        """Validation loader or loaders, as the user passed or returned them."""
        loop = self.validate_loop if self.state.fn == "validate" else self.fit_loop.validation
        return _loaders(loop.given)

    @property
    def test_dataloaders(self) -> Any:
        """Test loader or loaders, as the user passed or returned them."""
        return _loaders(self.test_loop.given)

    @property
    def predict_dataloaders(self) -> Any:
        """Prediction loader or loaders, as the user passed or returned them."""
        return _loaders(self.predict_loop.given)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Number of optimizer steps in the whole fit; infinite if unknown. May call the hook ``train_dataloader``.

        Example::

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters())
                steps = self.trainer.estimated_stepping_batches
                scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
                return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        """
        return self.fit_loop.estimated_steps()

    # -- optimization --------------------------------------------------------------------------------------

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of micro-batches per optimizer step in this epoch; a resume with more or fewer ranks may change it."""
        accumulate = self.config.accumulation(self.current_epoch)
        feed = self.session.fit.feed
        return accumulate if feed is None else feed.counting.micro(accumulate)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the fit."""
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self.strategy.optimizers = optimizers

    @property
    def wrapped_optimizers(self) -> list[LightningOptimizer]:
        """Optimizers as ``self.optimizers()`` returns them, with a ``step`` that runs the hooks."""
        return self.fit_loop.step.update.wrapped if self.fit_loop.has_step else []

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """Schedulers of the fit, with the interval and frequency of their steps."""
        return self.strategy.lr_scheduler_configs

    # -- metrics, loggers, callbacks -----------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Newest value of each logged name. A value is this rank's own until it is reduced over the ranks."""
        return self.session.callback_metrics()

    def memory(self) -> MemoryUse:
        """Return this rank's current memory use by kind; after a fit, the memory use when the fit ended.

        Activations are those of the first micro-batch of the fit.

        Raises:
            MisconfigurationException: the Trainer has not run a call yet.

        Example::

            trainer.fit(model, loader)
            print(trainer.memory())
        """
        return memory_of(self.session)

    def reduced_metrics(self) -> dict[str, Tensor]:
        """Return :attr:`callback_metrics` reduced over the ranks, so that decisions are the same on all ranks.

        Collective: call it on every rank, at the same place.

        The values are scalar tensors.
        """
        if self.strategy.absent:
            self.strategy.check_present("trainer.reduced_metrics()")
        if self.session.fitting and self.session.fit.results is not None:
            self.session.share_step_values()
        if self.world_size == 1:
            return dict(self.session.callback_metrics())
        found = self.published.reduced()  # values that callbacks have written may differ between ranks
        return self.strategy.broadcast({name: torch.as_tensor(value).cpu() for name, value in found.items()})

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Newest value of each name that is sent to the loggers."""
        self.session.show_logged("logged")
        return self.published.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Newest value of each name in the progress bar."""
        self.session.show_logged("progress_bar")
        shown = self.published.progress_bar
        # one transfer from the device for all values, and not one for each
        return dict(zip(shown, floats(list(shown.values())), strict=True))

    @property
    def loggers(self) -> list[Logger]:
        """All loggers. Users may assign a list, a single logger or None."""
        return self.session.loggers

    @loggers.setter
    def loggers(self, loggers: Logger | Iterable[Logger] | None) -> None:
        given = [loggers] if isinstance(loggers, Logger) else loggers
        self.session.loggers = list(given or ())

    @property
    def logger(self) -> Logger | None:
        """First logger, or None."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """Folder of the first logger's files, the same on all ranks; without loggers ``default_root_dir``."""
        found = getattr(self.logger, "log_dir", None) if self.loggers else self.default_root_dir
        return os.fspath(found) if isinstance(found, (str, os.PathLike)) else None

    @property
    def default_root_dir(self) -> str:
        """Default folder for logs and checkpoints."""
        return self.config.default_root_dir

    @property
    def ckpt_path(self) -> str | None:
        """Path of the checkpoint that the last call loaded. Users may assign a path for calls without ``ckpt_path``."""
        return self.session.ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | os.PathLike[str] | None) -> None:
        self.session.ckpt_path = self._user_ckpt_path = None if path is None else os.fspath(path)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """Callbacks that write checkpoints."""
        return self.session.checkpoint_callbacks

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """First callback that writes checkpoints, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """EarlyStopping callbacks."""
        return [callback for callback in self.session.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """First EarlyStopping callback, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """Progress bar, or None."""
        return self.session.progress_bar


# -- inner parts of Lightning's Trainer -----------------------------------------------------------------------


CONNECTORS: dict[str, dict[str, Callable[[Attributes], Any]]] = {
    "_accelerator_connector": {
        "_parallel_devices": lambda trainer: list(trainer.strategy.devices),
        "accelerator": lambda trainer: vars(trainer)["accelerator"],
        "is_distributed": lambda trainer: trainer.world_size > 1,
        "precision_plugin": lambda trainer: trainer.precision_plugin,
        "strategy": lambda trainer: trainer.strategy,
        "use_distributed_sampler": lambda trainer: trainer.config.use_distributed_sampler,
    },
    "_callback_connector": {"_reorder_callbacks": lambda trainer: in_order},
    # `alone`: third parties call it on rank 0 only, where a collective would hang
    "_checkpoint_connector": {"dump_checkpoint": lambda trainer: partial(collect, trainer.session, alone=True)},
    "_data_connector": {},
    "_logger_connector": {
        "callback_metrics": lambda trainer: trainer.callback_metrics,
        "log_metrics": lambda trainer: partial(_log_metrics, trainer.session),
        "logged_metrics": lambda trainer: trainer.logged_metrics,
        "progress_bar_metrics": lambda trainer: trainer.progress_bar_metrics,
    },
    "_signal_connector": {},
}
"""Getters for what third-party code reads from Lightning's private connectors; other names raise an error."""


def _log_metrics(session: Session, metrics: Mapping[str, Any], step: int | None = None) -> None:
    session.log_metrics(dict(metrics), step)
