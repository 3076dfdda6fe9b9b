"""Draws docs/balanced.png: a fit in two stages, of which one becomes slower, as StageTimeline draws it.

    python scripts/draw_stages.py

The fit is a real one on two processes. Its blocks take 4 ms forwards and 8 ms backwards by sleeping, so that other work
on the machine hardly shows; from step 50 on those of rank 1 take three times as long.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.callbacks import StageTimeline
from lockstep.strategies import BalancedStrategy

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "balanced.png"
BLOCKS, STEPS, SLOW_FROM, FACTOR = 8, 120, 50, 3
FORWARD, BACKWARD = 0.004, 0.008


class Asleep(nn.Module):
    """A block that takes as long as a device of made-up speed needs."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.factor * FORWARD)
        out = x * self.weight
        if out.requires_grad:
            out.register_hook(lambda gradient: time.sleep(self.factor * BACKWARD))
        return out


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(*(Asleep() for _ in range(BLOCKS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.chain(batch[0]).square().mean()
        return loss

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        Asleep.factor = float(FACTOR if self.global_rank == 1 and batch_idx >= SLOW_FROM else 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BalancedStrategy(micro_batches=4),
        max_steps=STEPS,
        callbacks=StageTimeline(PICTURE),
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(8 * STEPS, 4)), batch_size=8))
