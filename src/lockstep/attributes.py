"""What users read of a Trainer: its public attributes, derived from its parts."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.callbacks.progress.base import ProgressBar
from lockstep.config.run import set_flag
from lockstep.ground.states import RunningStage


class Attributes:
    """The read side of :class:`lockstep.Trainer`; it holds nothing of its own."""

    callbacks: list[Any]
    loggers: list[Any]

    def __getattr__(self, name: str) -> Any:  # flags are read as trainer.max_epochs, trainer.log_every_n_steps, ...
        config = self.__dict__.get("config")
        if config is not None and name in config.__dataclass_fields__:
            return getattr(config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        config = self.__dict__.get("config")
        return [*super().__dir__(), *(config.__dataclass_fields__ if config is not None else ())]

    def __setattr__(self, name: str, value: Any) -> None:
        config = self.__dict__.get("config")
        if config is not None and name in config.__dataclass_fields__:  # a flag set between two calls
            name, value = "config", set_flag(config, name, value)
        object.__setattr__(self, name, value)

    # -- where ---------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.strategy.world.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return self.strategy.world.local_rank

    @property
    def node_rank(self) -> int:
        """This node."""
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
        """Devices of this node."""
        return len(self.device_ids)

    @property
    def device_ids(self) -> list[int]:
        """The devices of this node by their numbers; on the CPU the processes are counted."""
        devices = self.strategy.devices
        if self.strategy.root_device.type == "cpu" and not self.strategy.drives_all_devices:
            return list(range(self.strategy.world.local_size))  # a launcher may have started more than were asked for
        return [number if device.index is None else device.index for number, device in enumerate(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """What a ``DistributedSampler`` of one's own is made with; None on one process."""
        if self.world_size == 1:
            return None
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.strategy.world.rank == 0

    @property
    def precision(self) -> str:
        """The full name of the run's precision, "32-true" for one."""
        return str(self.strategy.precision.name)

    @property
    def precision_plugin(self) -> Any:
        """The run's precision, as an object."""
        return self.strategy.precision

    @property
    def scaler(self) -> Any:
        """What scales the loss of 16-bit floats, or None."""
        return self.strategy.precision.scaler

    @property
    def model(self) -> Any:
        """The module; lockstep wraps it in nothing."""
        return self.lightning_module

    # -- how far -------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, counted from 0; after a fit the number of finished epochs."""
        return self.fit_loop.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps so far, of all optimizers."""
        return self.fit_loop.progress.global_step

    @property
    def is_last_batch(self) -> bool:
        """Whether the training batch at hand is the epoch's last."""
        return self.fit_loop.progress.last

    @property
    def is_padding_batch(self) -> bool:
        """Whether the training batch at hand is another rank's, as this one has none: nothing of it is to be counted.

        So it is under manual optimization, on several ranks, where the last samples of an epoch do not go round.
        """
        return self.fit_loop.step.is_padding

    @property
    def training(self) -> bool:
        """Whether a training batch may be running."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, on: bool) -> None:
        self._stage(RunningStage.TRAINING, on)

    @property
    def validating(self) -> bool:
        """Whether a validation runs."""
        return self.state.stage is RunningStage.VALIDATING

    @validating.setter
    def validating(self, on: bool) -> None:
        self._stage(RunningStage.VALIDATING, on)

    @property
    def testing(self) -> bool:
        """Whether a test runs."""
        return self.state.stage is RunningStage.TESTING

    @testing.setter
    def testing(self, on: bool) -> None:
        self._stage(RunningStage.TESTING, on)

    @property
    def predicting(self) -> bool:
        """Whether a prediction runs."""
        return self.state.stage is RunningStage.PREDICTING

    @predicting.setter
    def predicting(self, on: bool) -> None:
        self._stage(RunningStage.PREDICTING, on)

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check runs."""
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
        """Whether a validation, a test or the sanity check runs."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether the last call was interrupted."""
        return self.state.stopped and not self.state.finished

    # -- data ----------------------------------------------------------------------------------------------

    @property
    def num_training_batches(self) -> int | float:
        """Training batches of an epoch on each rank; infinite where the length is not known."""
        return self.fit_loop.feed.num_batches if self.fit_loop.feed is not None else math.inf

    @property
    def num_val_batches(self) -> list[int | float]:
        """Validation batches of this rank, by loader."""
        loop = self.validate_loop if self.state.fn == "validate" else self.fit_loop.validation
        return loop.num_batches

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Batches of each validation loader that the sanity check tries; infinite: all."""
        steps = self.config.num_sanity_val_steps
        return math.inf if steps == -1 else steps

    @property
    def val_check_batch(self) -> int | float | None:
        """Training batches between two validations; infinite: at the epoch's end; None: by time, or not known yet."""
        return self.fit_loop.timing.every

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of the sanity check, by loader."""
        return [min(self.num_sanity_val_steps, batches) for batches in self.fit_loop.validation.num_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """Test batches of this rank, by loader."""
        return self.test_loop.num_batches

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Prediction batches of this rank, by loader."""
        return self.predict_loop.num_batches

    @property
    def train_dataloader(self) -> Any:
        """The training loader or loaders as the user gave them."""
        return self.fit_loop.given

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader or loaders as the user gave them."""
        loop = self.validate_loop if self.state.fn == "validate" else self.fit_loop.validation
        return loop.given

    @property
    def test_dataloaders(self) -> Any:
        """The test loader or loaders as the user gave them."""
        return self.test_loop.given

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader or loaders as the user gave them."""
        return self.predict_loop.given

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole fit, for schedulers; asks for the training loader where it has to."""
        config = self.config
        if config.max_epochs == -1:
            return float("inf") if config.max_steps == -1 else config.max_steps
        self.fit_loop.setup_data()
        batches, steps = self.fit_loop.feed.rows, 0.0
        for epoch in range(config.max_epochs) if isinstance(config.accumulate_grad_batches, dict) else [0]:
            steps += batches if batches == math.inf else math.ceil(batches / config.accumulation(epoch))
        if not isinstance(config.accumulate_grad_batches, dict):
            steps *= config.max_epochs
        total = steps if config.max_steps == -1 else min(steps, config.max_steps)
        return total if total == math.inf else int(total)

    # -- optimization --------------------------------------------------------------------------------------

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of one window in the epoch that runs; after a resume on other ranks perhaps not the flag's."""
        accumulate = self.config.accumulation(self.current_epoch)
        return accumulate if self.fit_loop.feed is None else self.fit_loop.feed.counting.micro(accumulate)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the fit."""
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self.strategy.optimizers = optimizers

    @property
    def wrapped_optimizers(self) -> list[Any]:
        """The optimizers as ``self.optimizers()`` gives them."""
        return self.fit_loop.step.wrapped

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers of the fit, and when they are stepped."""
        return self.strategy.lr_scheduler_configs

    # -- metrics, loggers, callbacks -----------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Newest value of everything that was logged: of all ranks, or of this one until values are reduced."""
        self._publish_step()
        return self.published.callback

    def reduced_metrics(self) -> dict[str, Tensor]:
        """:attr:`callback_metrics`, reduced over the ranks and the same on all of them: what a decision reads.

        Collective: call it on every rank, at the same place.
        """
        if self.strategy.absent:
            self.strategy.check_present("trainer.reduced_metrics()")
        if self.state.fn == "fit" and self.fit_loop.results is not None:
            self.fit_loop.share_step_values()
        found = dict(self.published.callback)
        if self.world_size > 1:  # what callbacks wrote there themselves may differ
            found = self.strategy.broadcast({name: torch.as_tensor(value).cpu() for name, value in found.items()})
        return found

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Newest value of what goes to the loggers."""
        self._publish_step()
        return self.published.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Newest value of what the progress bar shows."""
        self._publish_step()
        return {name: float(value) for name, value in self.published.progress_bar.items()}

    def _publish_step(self) -> None:
        if self.training and self.results is not None:
            self.published.publish(self.results.step_values())

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """The folder of this run's logs, the same on all ranks."""
        found = getattr(self.logger, "log_dir", None) if self.loggers else self.default_root_dir
        return os.fspath(found) if isinstance(found, (str, os.PathLike)) else None

    @property
    def default_root_dir(self) -> str:
        """The folder under which logs and checkpoints go."""
        return self.config.default_root_dir

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the call goes on from. Set it, and calls that name none take it."""
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | os.PathLike[str] | None) -> None:
        self._ckpt_path = self._ckpt_wanted = None if path is None else os.fspath(path)

    def _of(self, kind: type) -> list[Any]:
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that write checkpoints."""
        return self._of(Checkpoint)

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that writes checkpoints, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The EarlyStopping callbacks."""
        return self._of(EarlyStopping)

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping callback, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar, or None."""
        return next(iter(self._of(ProgressBar)), None)
