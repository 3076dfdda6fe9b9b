"""ThroughputMonitor: logs samples, items and operations per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.callbacks.base import Callback
from lockstep.extensions.extras.throughput import Throughput, get_available_flops
from lockstep.ground.device import synchronize
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.types import RunningStage

if TYPE_CHECKING:
    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

_STAGE_OF = {
    "fit": RunningStage.TRAINING,
    "validate": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}


@dataclass
class _Meter:
    """Meter of one stage's throughput, with the totals of batches and samples since its last reset."""

    throughput: Throughput
    start: float = 0.0
    batches: int = 0
    samples: int = 0
    lengths: int = 0
    seen: int = 0  # batches of all passes, the x axis of an evaluation's values

    def reset(self) -> None:
        self.throughput.reset()
        self.batches = self.samples = self.lengths = 0


class ThroughputMonitor(Callback):
    """Callback that measures and logs the throughput of training, validation, test and prediction.

    Rank 0 measures, assuming that all ranks are equally fast. Every ``log_every_n_steps`` steps (batches in
    evaluation), it logs the metrics of :class:`~lockstep.utilities.throughput.Throughput` as ``train/...``,
    ``validate/...``, ``test/...`` and ``predict/...``. The time of validations does not count as training time. On a
    GPU, every batch is synchronized, because its time could not be measured otherwise.

    If the module has an attribute or property ``flops_per_batch`` (see
    :func:`~lockstep.utilities.throughput.measure_flops`), operations per second are measured, too, and on known devices
    their fraction of the device's peak.

    Args:
        batch_size_fn: returns the number of samples of a batch.
        length_fn: returns the number of items (such as tokens) of a batch, at least one a sample.
        **kwargs: arguments of :class:`~lockstep.utilities.throughput.Throughput`: ``window_size``, ``separator``,
            ``available_flops``.

    Attributes:
        available_flops: peak operations per second of the device; None if unknown.

    Example::

        class Model(LightningModule):
            def setup(self, stage):
                with torch.device("meta"):
                    model, x = Net(), torch.randn(32, 784)
                self.flops_per_batch = measure_flops(model, lambda: model(x), torch.Tensor.sum)

        Trainer(callbacks=ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=50))
    """

    def __init__(
        self, batch_size_fn: Callable[[Any], int], length_fn: Callable[[Any], int] | None = None, **kwargs: Any
    ) -> None:
        # Invalid arguments raise here, before a run starts.
        Throughput(**kwargs)
        self.kwargs = kwargs
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.available_flops: int | None = None
        self._meters: dict[RunningStage, _Meter] = {}
        self._has_flops: bool | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create a meter for each stage of this run."""
        if not trainer.loggers:
            rank_zero_warn("ThroughputMonitor logs nothing, because the Trainer has no logger.")
        # The dtype of matrix products: mixed and true precisions share it, and all others compute in float32.
        dtypes = {"64": torch.float64, "16": torch.float16, "bf": torch.bfloat16}
        dtype = dtypes.get(trainer.precision[:2], torch.float32)
        known = self.kwargs.get("available_flops")
        self.available_flops = get_available_flops(trainer.strategy.root_device, dtype) if known is None else known
        self._has_flops = None
        stages = [_STAGE_OF[stage]]
        if stage == "fit" and trainer.enable_validation:
            stages.append(RunningStage.VALIDATING)
        settings = {"world_size": trainer.world_size, **self.kwargs, "available_flops": self.available_flops}
        self._meters.update({each: _Meter(Throughput(**settings)) for each in stages})

    # -- training ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, RunningStage.TRAINING)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Measure the batch; after every ``log_every_n_steps``-th accumulation window, log the throughput."""
        if not trainer.is_global_zero:
            return
        self._update(trainer, pl_module, RunningStage.TRAINING, batch)
        self._on_any_batch_end(trainer, pl_module, batch_idx)

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        every, windows = trainer.log_every_n_steps, trainer.fit_loop.progress.windows
        ends = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if every and ends and (windows + 1) % every == 0:
            self._write(trainer, RunningStage.TRAINING, windows, epoch=trainer.current_epoch)

    # -- evaluation ----------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._start(trainer, _stage(trainer))

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        stage, every = _stage(trainer), trainer.log_every_n_steps
        self._update(trainer, pl_module, stage, batch)
        self._meters[stage].seen += 1
        if every and (batch_idx + 1) % every == 0:
            self._write(trainer, stage, self._meters[stage].seen)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude the duration of the validation from the training time."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        training, validation = self._meters[RunningStage.TRAINING], self._meters[RunningStage.VALIDATING]
        # The clock of training restarts at its last measured time, when validation ended.
        validation_end = validation.start + validation.throughput.seconds
        training.start = validation_end - training.throughput.seconds

    # -- the meters ----------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer, stage: RunningStage) -> None:
        if trainer.is_global_zero:
            meter = self._meters[stage]
            meter.reset()
            meter.start = time.perf_counter()

    @torch.no_grad()  # the user's functions may compute with tensors that require gradients
    def _update(self, trainer: Trainer, pl_module: LightningModule, stage: RunningStage, batch: object) -> None:
        device, meter = trainer.strategy.root_device, self._meters[stage]
        # Without it, the clock would measure when kernels are queued and not when they finish.
        synchronize(device)
        elapsed = time.perf_counter() - meter.start
        if self._has_flops is None:
            self._has_flops = hasattr(pl_module, "flops_per_batch")
            if not self._has_flops:
                rank_zero_warn(
                    f"ThroughputMonitor: {type(pl_module).__name__} has no attribute `flops_per_batch`, so operations "
                    "per second are not measured. lockstep.utilities.throughput.measure_flops computes it."
                )
        meter.batches += 1
        meter.samples += self.batch_size_fn(batch)
        if self.length_fn is not None:
            meter.lengths += self.length_fn(batch)
        meter.throughput.update(
            time=elapsed,
            batches=meter.batches,
            samples=meter.samples,
            lengths=None if self.length_fn is None else meter.lengths,
            flops=cast("int", pl_module.flops_per_batch) if self._has_flops else None,
        )

    def _write(self, trainer: Trainer, stage: RunningStage, step: int, **also: float) -> None:
        throughput = self._meters[stage].throughput
        metrics = {f"{stage.value}{throughput.separator}{name}": v for name, v in throughput.compute().items()}
        for logger in trainer.loggers:
            logger.log_metrics({**metrics, **also}, step=step)
            logger.save()


def _stage(trainer: Trainer) -> RunningStage:
    """Return the current stage of the Trainer. Call this function only in hooks, where the stage is never None."""
    assert trainer.state.stage is not None
    return trainer.state.stage
