"""Minimal modules, data modules and data sets for tests and bug reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lockstep.datamodule import LightningDataModule
from lockstep.module import LightningModule

# -- data sets -----------------------------------------------------------------------------------------------


def _rows(size: int, length: int, seed: int) -> Tensor:
    return torch.randn(length, size, generator=torch.Generator().manual_seed(seed))


class RandomDataset(Dataset[Tensor]):
    """A data set of ``length`` normal vectors of ``size`` numbers (float32).

    Args:
        size: length of each vector.
        length: number of samples.
        seed: seed of the random numbers.
    """

    def __init__(self, size: int, length: int, seed: int = 0) -> None:
        self.data = _rows(size, length, seed)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


class RandomDictDataset(RandomDataset):
    """`RandomDataset` with samples ``{"a": vector, "b": vector + 2}``."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        return {"a": self.data[index], "b": self.data[index] + 2}


class RandomIterableDataset(IterableDataset[Tensor]):
    """An iterable data set of ``count`` normal vectors of ``size`` numbers, without a length.

    Args:
        size: length of each vector.
        count: number of samples.
        seed: seed of the random numbers.
    """

    def __init__(self, size: int, count: int, seed: int = 0) -> None:
        self.size = size
        self.count = count
        self.seed = seed

    def __iter__(self) -> Iterator[Tensor]:
        yield from _rows(self.size, self.count, self.seed)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """`RandomIterableDataset` with a length."""

    def __len__(self) -> int:
        return self.count


# -- modules and data modules --------------------------------------------------------------------------------


class BoringModel(LightningModule):
    """A LightningModule with a linear layer from 32 to 2 that learns to output ones, with all steps and loaders.

    Derive from it and override what the test is about::

        class Logs(BoringModel):
            def training_step(self, batch, batch_idx):
                loss = self.step(batch)
                self.log("loss", loss)
                return loss
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 32)`` to ``(batch, 2)``.

        Args:
            x: float tensor of shape ``(batch, 32)``.
        """
        return self.layer(x)

    def loss(self, predictions: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared error to ``labels``, or to ones.

        Args:
            predictions: tensor of shape ``(batch, 2)``.
            labels: tensor of the same shape; None: ones.

        Returns:
            a scalar tensor.
        """
        return nn.functional.mse_loss(predictions, torch.ones_like(predictions) if labels is None else labels)

    def step(self, batch: Tensor) -> Tensor:
        """Return the loss for a batch. Training, validation and test steps call this method.

        Args:
            batch: float tensor of shape ``(batch, 32)``.
        """
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LRScheduler]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64, seed=0))

    def val_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64, seed=1))

    def test_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64, seed=2))

    def predict_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64, seed=3))


class ManualOptimBoringModel(BoringModel):
    """`BoringModel` with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BoringDataModule(LightningDataModule):
    """A data module with 256 vectors of 32 numbers, split into quarters for fit, validate, test and predict."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.random_train = Subset(self.random_full, range(64))
        if stage in ("fit", "validate"):
            self.random_val = Subset(self.random_full, range(64, 64 * 2))
        if stage == "test":
            self.random_test = Subset(self.random_full, range(64 * 2, 64 * 3))
        if stage == "predict":
            self.random_predict = Subset(self.random_full, range(64 * 3, 64 * 4))

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class BoringDataModuleNoLen(BoringDataModule):
    """`BoringDataModule` with iterable data sets without a length."""

    def train_dataloader(self) -> Any:
        return DataLoader(RandomIterableDataset(32, 64, seed=0))

    def val_dataloader(self) -> Any:
        return DataLoader(RandomIterableDataset(32, 64, seed=1))

    def test_dataloader(self) -> Any:
        return DataLoader(RandomIterableDataset(32, 64, seed=2))

    def predict_dataloader(self) -> Any:
        return DataLoader(RandomIterableDataset(32, 64, seed=3))
