"""A module that logs in every stage, and fits of it with a logger."""

from __future__ import annotations

from typing import Any

from lockstep import Trainer
from lockstep.testing.models import BoringModel
from tests.loop.pieces import quiet


class Net(BoringModel):
    """Logs its step number in training, and constants in validation and test."""

    def __init__(self, lr: float = 0.1, more: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", float(self.global_step))
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 2.0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", 3.0)


def fit(loggers: Any, model: Any = None, **flags: Any) -> Trainer:
    """A fit of two epochs of two batches and one validation batch."""
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1}
    trainer = quiet(**{"logger": loggers, "max_epochs": 2, "log_every_n_steps": 1, **limits, **flags})
    trainer.fit(model or Net())
    return trainer
