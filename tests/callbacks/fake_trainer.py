"""A trainer that only plays hooks: what the tests of callbacks run instead of a real one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.trainer.states import TrainerFn, TrainerState


@dataclass
class FakeLogger:
    """Remembers what was written to it."""

    version: int | str | None = 0
    written: list[tuple[int | None, dict[str, float]]] = field(default_factory=list)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.written.append((step, dict(metrics)))


@dataclass
class FakeTrainer:
    """The part of a Trainer that callbacks look at, as plain attributes."""

    callbacks: list[Any] = field(default_factory=list)
    max_epochs: int | None = 3
    max_steps: int = -1
    num_training_batches: int | float = 4
    num_val_batches: list[int | float] = field(default_factory=lambda: [2])
    num_sanity_val_batches: list[int | float] = field(default_factory=lambda: [1])
    num_test_batches: list[int | float] = field(default_factory=lambda: [2])
    num_predict_batches: list[int | float] = field(default_factory=lambda: [2])
    accumulate_grad_batches: int = 1
    check_val_every_n_epoch: int | None = 1
    val_check_interval: int | float = 1.0
    log_every_n_steps: int = 1
    loggers: list[Any] = field(default_factory=lambda: [FakeLogger()])
    optimizers: list[Any] = field(default_factory=list)
    lr_scheduler_configs: list[Any] = field(default_factory=list)
    callback_metrics: dict[str, Tensor] = field(default_factory=dict)
    progress_bar_metrics: dict[str, Any] = field(default_factory=dict)
    state: TrainerState = field(default_factory=lambda: TrainerState(fn=TrainerFn.FITTING))
    strategy: Any = field(
        default_factory=lambda: SimpleNamespace(root_device=torch.device("cpu"), broadcast=lambda obj: obj)
    )
    world_size: int = 1
    global_rank: int = 0
    current_epoch: int = 0
    global_step: int = 0
    fast_dev_run: int = 0
    should_stop: bool = False
    sanity_checking: bool = False
    is_last_batch: bool = False
    enable_validation: bool = True
    seconds_per_batch: float = 0.0

    @property
    def fit_loop(self) -> Any:
        return SimpleNamespace(
            progress=SimpleNamespace(windows=self.global_step, batch=0),
            lacks_metrics=None,
            is_interrupted=False,
            expects_validation=self.enable_validation and sum(self.num_val_batches) > 0,
            validation=SimpleNamespace(num_batches=self.num_val_batches),
        )

    @property
    def validate_loop(self) -> Any:
        return self.fit_loop.validation

    @property
    def test_loop(self) -> Any:
        return SimpleNamespace(num_batches=self.num_test_batches)

    @property
    def predict_loop(self) -> Any:
        return SimpleNamespace(num_batches=self.num_predict_batches)

    @property
    def num_sanity_val_steps(self) -> int | float:
        return max(self.num_sanity_val_batches)

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def reduced_metrics(self) -> dict[str, Tensor]:
        return self.strategy.broadcast(dict(self.callback_metrics))

    def call(self, hook: str, module: Any, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, module, *args)

    def fit(self, module: nn.Module, step: Any = None, *, first_batch: int = 0) -> None:
        """Play a fit: ``step(self, batch_idx)`` is what a batch does."""
        self.call("setup", module, "fit")
        self.call("on_fit_start", module)
        self.sanity_checking = True
        self.call("on_sanity_check_start", module)
        self.evaluate(module, "validation", self.num_sanity_val_batches)
        self.call("on_sanity_check_end", module)
        self.sanity_checking = False
        self.call("on_train_start", module)
        while not self.should_stop and (self.max_epochs is None or self.current_epoch < self.max_epochs):
            self.epoch(module, step, first_batch)
            first_batch = 0
            self.current_epoch += 1
        self.call("on_train_end", module)
        self.call("on_fit_end", module)
        self.call("teardown", module, "fit")

    def epoch(self, module: nn.Module, step: Any, first_batch: int = 0) -> None:
        self.call("on_train_epoch_start", module)
        for batch_idx in range(first_batch, int(self.num_training_batches)):
            self.call("on_train_batch_start", module, None, batch_idx)
            time.sleep(self.seconds_per_batch)
            self.is_last_batch = batch_idx + 1 == self.num_training_batches
            if step is not None:
                step(self, batch_idx)
            if (batch_idx + 1) % self.accumulate_grad_batches == 0:
                self.global_step += 1
            self.call("on_train_batch_end", module, None, None, batch_idx)
        if self.enable_validation:
            self.evaluate(module, "validation", self.num_val_batches)
        self.call("on_train_epoch_end", module)

    def evaluate(self, module: nn.Module, what: str, batches: list[int | float]) -> None:
        self.call(f"on_{what}_start", module)
        self.call(f"on_{what}_epoch_start", module)
        for loader, number in enumerate(batches):
            for batch_idx in range(int(number)):
                self.call(f"on_{what}_batch_start", module, None, batch_idx, loader)
                time.sleep(self.seconds_per_batch)
                self.call(f"on_{what}_batch_end", module, None, None, batch_idx, loader)
        self.call(f"on_{what}_epoch_end", module)
        self.call(f"on_{what}_end", module)
