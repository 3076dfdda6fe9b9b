"""The same run by lockstep and by the installed Lightning: what the tests that compare callbacks are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
import lockstep.callbacks
import lockstep.loggers

OURS = SimpleNamespace(
    name="lockstep",
    Trainer=lockstep.Trainer,
    LightningModule=lockstep.LightningModule,
    Callback=lockstep.Callback,
    callbacks=lockstep.callbacks,
    Logger=lockstep.loggers.Logger,
    flags={"order": "torch"},
)


def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lightning, with the same names; skips the test where it is not installed."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it, and leaves it
    pl = pytest.importorskip("lightning.pytorch")
    return SimpleNamespace(
        name="lightning",
        Trainer=pl.Trainer,
        LightningModule=pl.LightningModule,
        Callback=pl.Callback,
        callbacks=pl.callbacks,
        Logger=pl.loggers.Logger,
        flags={},
    )


def trainer(kit: Any, **flags: Any) -> Any:
    """A Trainer on one process that writes nothing."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return kit.Trainer(**{**quiet, **kit.flags, **flags})


def net(batch_norm: bool) -> nn.Module:
    """A small network of known weights, in float64."""
    torch.manual_seed(3)
    middle: nn.Module = nn.BatchNorm1d(4) if batch_norm else nn.Tanh()
    return nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 1)).double()


def loader(samples: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    """Rows and targets, in order."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=batch_size)


def model(kit: Any, batch_norm: bool = False, scheduler: bool = False, lr: float = 0.1) -> Any:
    """A regression whose learning rate at each batch is noted in ``rates``."""

    class Model(kit.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net(batch_norm)
            self.rates: list[float] = []
            self.validated: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return (self.net(x) - y).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.validated.append((self.net(x) - y).square().mean().item())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)] if scheduler else []

    return Model()


def recorder(kit: Any) -> Any:
    """A logger that keeps what it is sent: (step, metrics)."""

    class Recorder(kit.Logger):  # type: ignore[name-defined,misc]
        name = "recorder"
        version = 0

        def __init__(self) -> None:
            super().__init__()
            self.sent: list[tuple[int | None, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.sent.append((step, dict(metrics)))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Recorder()
