"""What the tests of the tuner are made of: a module in float64 with everything that a trial could change."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, LightningDataModule, LightningModule

FEATURES = 4


def samples(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Net(LightningModule):
    """Dropout, BatchNorm, a buffer that no checkpoint holds, momentum and a scheduler."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)
        ).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.sizes: list[int] = []
        self.steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen += len(x)
        self.sizes.append(len(x))
        self.steps.append(self.global_step)
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Data(LightningDataModule):
    """Loaders of the size that an attribute says; ``most``: larger batches do not fit into memory."""

    def __init__(self, batch_size: int = 5, most: int = 1000, count: int = 48) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.most = most
        self.count = count
        self.tried: list[int] = []

    def loader(self, shuffle: bool = False) -> DataLoader[Any]:
        self.tried.append(self.batch_size)
        return DataLoader(samples(self.count), self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(shuffle=True)

    val_dataloader = test_dataloader = predict_dataloader = loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.batch_size > self.most:
            raise RuntimeError(f"CUDA out of memory: {self.batch_size} samples")
        return batch


def contents(trainer: Any) -> dict[str, Any]:
    """Everything that a search has to leave as it was."""
    module, strategy = trainer.lightning_module, trainer.strategy
    return copy.deepcopy(
        {
            "weights": dict(module.state_dict()),
            "buffers": dict(module.named_buffers()),
            "modes": [part.training for part in module.modules()],
            "optimizers": [optimizer.state_dict() for optimizer in strategy.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in strategy.lr_scheduler_configs],
            "stepped": [sorted(vars(optimizer)) for optimizer in strategy.optimizers],
            "random": torch.get_rng_state(),
            "counters": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.progress.state_dict()),
            "config": trainer.config,
            "loggers": [id(logger) for logger in trainer.loggers],
            "callbacks": [id(callback) for callback in trainer.callbacks],
            "callback states": [callback.state_dict() for callback in trainer.callbacks],
            "metrics": dict(trainer.callback_metrics),
            "stopping": (trainer.should_stop, trainer.interruption),
            "gradients": [parameter.grad for parameter in module.parameters()],
        }
    )


class Compare(Callback):
    """Notes everything before and after a finder, which stands between two of these."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.notes.append(contents(trainer))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.notes.append(contents(trainer))


def same(left: Any, right: Any) -> bool:
    """Equal bit for bit, tensors too."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if not same(before[name], after[name])]
