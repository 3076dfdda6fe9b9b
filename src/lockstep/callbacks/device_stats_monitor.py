"""DeviceStatsMonitor: logs statistics of the device, batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.memory_use import memory_stats

if TYPE_CHECKING:
    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Callback that logs statistics of the device at the start and end of batches.

    In training it logs every ``log_every_n_steps`` steps. In tests and validation (within a fit or on its own) it logs
    every ``log_every_n_steps`` batches. The names are ``DeviceStatsMonitor.<hook>/<metric>``, for example
    ``DeviceStatsMonitor.on_train_batch_start/cpu_percent``:

    - CPU (extra ``psutil``): ``cpu_percent``, ``cpu_vm_percent``, ``cpu_swap_percent`` of the whole machine;
    - accelerators: memory statistics of torch's allocator; on CUDA devices all of :func:`torch.cuda.memory_stats`,
      such as ``allocated_bytes.all.peak``;
    - MPS, additionally (extra ``psutil``): ``M1_percent``, ``M1_vm_percent``, ``M1_swap_percent`` of the whole machine.

    Args:
        cpu_stats: True: also log the CPU's statistics if the run is on another device. False: log nothing if the run
            is on the CPU. None: log the statistics of the run's device.

    Raises:
        MisconfigurationException: the Trainer has no logger.
        ModuleNotFoundError: psutil is needed and not installed.

    Example::

        Trainer(callbacks=DeviceStatsMonitor(), logger=CSVLogger("logs"))
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._psutil: Any = None
        self._evaluated = 0  # batches of the current evaluation, of all its loaders

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise if the Trainer has no logger; import psutil if CPU statistics are logged."""
        device = trainer.strategy.root_device.type
        if stage == "fit" and not trainer.loggers:
            raise MisconfigurationException(
                "DeviceStatsMonitor needs a logger, but the Trainer has none. Remove the callback, or remove "
                "`logger=False`."
            )
        reads_cpu = self._cpu_stats is not False if device == "cpu" else bool(self._cpu_stats)
        if reads_cpu or device == "mps":
            try:
                import psutil
            except ModuleNotFoundError:
                raise missing_extra("psutil", "psutil", f"DeviceStatsMonitor on {device}") from None
            self._psutil = psutil

    # -- training ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._write_in_training(trainer, "on_train_batch_start")

    def _on_any_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        self._write_in_training(trainer, "on_train_batch_start")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        self._write_in_training(trainer, "on_train_batch_end")

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        self._write_in_training(trainer, "on_train_batch_end")

    def _write_in_training(self, trainer: Trainer, hook: str) -> None:
        # 0 turns logging of steps off
        every = trainer.log_every_n_steps
        if every and ((trainer.fit_loop.progress.windows + 1) % every == 0 or trainer.should_stop):
            self._write(trainer, hook)

    # -- evaluation ----------------------------------------------------------------------------------------

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        # counted over all loaders, since `batch_idx` starts again with each
        self._evaluated = 1 if batch_idx == dataloader_idx == 0 else self._evaluated + 1
        self._write_in_evaluation(trainer, "start")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._write_in_evaluation(trainer, "end")

    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end

    def _write_in_evaluation(self, trainer: Trainer, at: str) -> None:
        every = trainer.log_every_n_steps
        if every and (self._evaluated % every == 0 or trainer.should_stop):
            self._write(trainer, f"on_{'test' if trainer.testing else 'validation'}_batch_{at}")

    # -- the statistics ------------------------------------------------------------------------------------

    def _write(self, trainer: Trainer, hook: str) -> None:
        stats = self._stats(trainer.strategy.root_device)
        if not stats:
            return
        name, step = f"{type(self).__qualname__}.{hook}", trainer.fit_loop.progress.windows
        for logger in trainer.loggers:
            separator = getattr(logger, "group_separator", "/")
            logger.log_metrics({f"{name}{separator}{key}": value for key, value in stats.items()}, step=step)

    def _stats(self, device: torch.device) -> dict[str, float]:
        if device.type == "cpu":
            return {} if self._cpu_stats is False else self._machine("cpu")
        stats: dict[str, float] = {**memory_stats(device)}
        if device.type == "mps":
            stats.update(self._machine("M1"))
        if self._cpu_stats:
            stats.update(self._machine("cpu"))
        return stats

    def _machine(self, prefix: str) -> dict[str, float]:
        return {
            f"{prefix}_vm_percent": self._psutil.virtual_memory().percent,
            f"{prefix}_percent": self._psutil.cpu_percent(),
            f"{prefix}_swap_percent": self._psutil.swap_memory().percent,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_psutil": None}
