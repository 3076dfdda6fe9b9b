"""What the tests of the loops are made of: a quiet Trainer, a module of known gradient, a logger that remembers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lockstep import LightningModule, Trainer
from lockstep.callbacks import Callback
from lockstep.ground.rank import forget_warnings
from lockstep.loggers import Logger
from lockstep.testing.devices import chosen_accelerator

QUIET: dict[str, Any] = {
    "accelerator": chosen_accelerator(),
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
if QUIET["accelerator"] != "cpu":
    QUIET["devices"] = 1  # "auto" is one process on the CPU, and elsewhere all devices


def quiet(**flags: Any) -> Trainer:
    """A Trainer that writes nothing and says nothing."""
    return Trainer(**{**QUIET, **flags})


def on_ranks(**flags: Any) -> Trainer:
    """The same in a rank of the pool."""
    return quiet(strategy="ddp", devices=torch.distributed.get_world_size(), **flags)


def numbers(count: int, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    """A loader of the numbers 1, 2, ... ``count``, in order."""
    return DataLoader(torch.arange(1, count + 1, dtype=torch.float64), batch_size=batch_size, **options)  # type: ignore[arg-type]


class Stream(IterableDataset[float]):
    """The numbers 1, 2, ... ``count``, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(float(number) for number in range(1, self.count + 1))


class Slope(LightningModule):
    """One weight ``w``, whose loss ``w * x`` has the gradient ``x``: a window's gradient is the mean of its samples.

    Attributes:
        gradients: the gradient of each window, before clipping.
        applied: the gradient that each update took, after clipping.
        batches: what each training step was given.
        validated: the optimizer steps and batches before each validation.
    """

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.lr = lr
        self.gradients: list[float] = []
        self.applied: list[float] = []
        self.batches: list[Any] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch.tolist() if isinstance(batch, Tensor) else batch)
        return (self.w * batch).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.w.grad is not None:
            self.gradients.append(self.w.grad.item())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.w.grad is not None:
            self.applied.append(self.w.grad.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Validated(Slope):
    """`Slope` that notes after how many training batches each validation came."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(len(self.batches))


class SaveAt(Callback):
    """Saves behind one micro-batch of an epoch."""

    def __init__(self, batch: int, path: str | Path, epoch: int = 0) -> None:
        self.place, self.path = (epoch, batch), path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.place:
            trainer.save_checkpoint(self.path)


class Killed(Exception):
    """Replaces a SIGKILL."""


class Cut(Callback):
    """Saves at the ``nth`` call of ``hook`` after the sanity check, and ends the run there."""

    def __init__(self, hook: str, nth: int, path: Path) -> None:
        self.path, self.left = path, nth
        setattr(self, hook, self.cut)

    def cut(self, trainer: Any, *args: Any) -> None:
        self.left -= not trainer.sanity_checking
        if not self.left and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            raise Killed


def acting(base: type = Slope, **acts: Callable[..., Any]) -> Any:
    """A module of ``base`` whose hooks call ``act(module, *arguments)``; the base's own follows if that gives None."""

    def hook(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        inherited = getattr(base, name, lambda *args: None)

        def run(self: Any, *args: Any) -> Any:
            found = act(self, *args)
            return inherited(self, *args) if found is None else found

        run.__name__ = name  # which profilers report
        return run

    return type("Acting", (base,), {name: hook(name, act) for name, act in acts.items()})()


def heard(run: Callable[[], Any], *words: str) -> list[str]:
    """The warnings of a run in which all of these words are."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [text for text in (str(each.message) for each in seen) if all(word in text for word in words)]


def heard_again(run: Callable[[], Any], *words: str) -> list[str]:
    """The same, with those that are given once in a process and have been given."""
    forget_warnings()
    return heard(run, *words)


class Recorder(Logger):
    """Keeps what it is sent, in order: (step, metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int | None, dict[str, float]]] = []
        self.hparams: list[Any] = []
        self.ended: list[str] = []

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.sent.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hparams.append(params)

    def finalize(self, status: str) -> None:
        self.ended.append(status)
