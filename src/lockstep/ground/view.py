"""What code below the Trainer may see of it: the types that modules, callbacks and loggers are written against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.ground.states import TrainerState


class ModuleView(Protocol):
    """What callbacks may see of a LightningModule (it is a ``torch.nn.Module`` too)."""

    automatic_optimization: bool
    training: bool

    @property
    def device(self) -> torch.device: ...

    def log(self, name: str, value: Any, **options: Any) -> None: ...

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None: ...

    def named_modules(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...


class StrategyView(Protocol):
    """Where the ranks are, and the collectives that user code may call."""

    root_device: torch.device

    @property
    def is_global_zero(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    def barrier(self, name: str | None = None) -> None: ...

    def broadcast(self, obj: Any, src: int = 0) -> Any: ...

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor: ...

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any: ...


class AgreementView(Protocol):
    """Flags that all ranks see at the same boundary; see ``ground/agreement.py``."""

    def register(self, name: str) -> int: ...

    def request(self, bit: int) -> None: ...

    def is_up(self, bit: int) -> bool: ...

    def lower(self, bit: int) -> None: ...

    def now(self, bit: int) -> bool: ...


class TrainerView(Protocol):
    """The part of the Trainer's public surface that callbacks, modules and loggers rely on."""

    state: TrainerState
    should_stop: bool
    callbacks: list[Any]
    loggers: list[Any]
    agreement: AgreementView
    fast_dev_run: int
    log_every_n_steps: int
    accumulate_grad_batches: int
    check_val_every_n_epoch: int | None
    val_check_interval: int | float
    limit_train_batches: int | float
    limit_val_batches: int | float
    default_root_dir: str
    callback_metrics: dict[str, Tensor]
    logged_metrics: dict[str, Tensor]
    progress_bar_metrics: dict[str, Any]
    current_epoch: int
    global_step: int
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    is_global_zero: bool
    global_rank: int
    local_rank: int
    world_size: int
    num_training_batches: int | float
    num_val_batches: list[int | float]
    num_test_batches: list[int | float]
    num_predict_batches: list[int | float]
    num_sanity_val_batches: list[int | float]
    is_last_batch: bool
    is_padding_batch: bool
    enable_validation: bool
    sanity_checking: bool
    training: bool
    validating: bool
    testing: bool
    predicting: bool
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    estimated_stepping_batches: int | float
    log_dir: str | None
    logger: Any
    lightning_module: Any
    datamodule: Any
    strategy: Any
    fit_loop: Any
    predict_loop: Any
    checkpoint_callback: Any
    checkpoint_callbacks: list[Any]
    progress_bar_callback: Any
    precision: str
    received_sigterm: bool
    interruption: str | None

    reduced_metrics: Callable[[], dict[str, Tensor]]
    save_checkpoint: Callable[..., None]
    print: Callable[..., None]
