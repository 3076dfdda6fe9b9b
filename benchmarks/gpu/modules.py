"""LightningModules and data that several parts of `scripts/gpu` train."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from benchmarks.engine.language import BYTES, GPT, Size
from benchmarks.gpu.models import ResNet
from lockstep import LightningModule

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
WIDTH, CLASSES = 20, 10


class Classifier(LightningModule):
    """A network that names classes, with what most people have: logs, validation, a metric, a schedule.

    Args:
        net: gives logits.
        metric: whether to keep an accuracy of torchmetrics', where it is installed.
    """

    def __init__(self, net: nn.Module, metric: bool = True) -> None:
        super().__init__()
        self.net = net
        self.losses: list[Tensor] = []
        self.accuracy: Any = None
        if metric and find_spec("torchmetrics") is not None:
            classification: Any = importlib.import_module("torchmetrics.classification")
            self.accuracy = classification.MulticlassAccuracy(CLASSES)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(self.net(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0]).float()
        self.log("val_loss", cross_entropy(logits, batch[1]))
        if self.accuracy is not None:
            self.accuracy(logits, batch[1])
            self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


class Language(Classifier):
    """A GPT that predicts bytes."""

    def loss(self, batch: Any) -> Tensor:
        (text,) = batch
        return cross_entropy(self.net(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def perceptron(dropout: float = 0.0) -> nn.Module:
    """About a thousand parameters."""
    layers = [nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers)


def rows(count: int, batch_size: int, shuffle: bool = True) -> DataLoader[Any]:
    """Random rows and their classes."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTH, generator=source)
    y = torch.randint(CLASSES, (count,), generator=source)
    return DataLoader(TensorDataset(x, y), batch_size, shuffle=shuffle)


def images(count: int, batch_size: int, size: int = 32) -> DataLoader[Any]:
    """Random images and their classes."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, size, size, generator=source)
    y = torch.randint(CLASSES, (count,), generator=source)
    return DataLoader(TensorDataset(x, y), batch_size, shuffle=True)


def text(count: int, batch_size: int, length: int) -> DataLoader[Any]:
    """Random bytes."""
    source = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randint(BYTES, (count, length + 1), generator=source)), batch_size)


class Stream(IterableDataset[Any]):
    """Rows of a data set without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield torch.full((WIDTH,), float(number % 7)), number % CLASSES


def models(small: bool, steps: int) -> dict[str, tuple[Any, Any]]:
    """Name -> what makes a module, and what makes its loader: residual network, transformer, perceptron."""
    batch = 4 if small else 32
    size = Size(32, 2, context=16) if small else Size(512, 12, heads=8, context=256)
    net = ((1, 1), 8) if small else ((2, 2, 2, 2), 64)
    count = steps * batch
    return {
        "perceptron": (lambda: Classifier(perceptron()), lambda: rows(count, batch)),
        "residual network": (lambda: Classifier(ResNet(*net, CLASSES)), lambda: images(count, batch)),
        "transformer": (lambda: Language(GPT(size), metric=False), lambda: text(count, batch, size.context)),
    }
