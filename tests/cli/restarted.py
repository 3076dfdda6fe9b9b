"""What the tests of ``lockstep run`` start: two fits and a test, in which ranks are killed.

lockstep run --devices 2 --max-restarts 2 tests/cli/restarted.py FOLDER --kill 1:rank=1,step=4 --kill 2:rank=0,step=9
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lockstep import LightningModule, Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint
from tests.tools.average import MovingAverage
from tests.tools.crash import Kill, KillAt, digest


class Net(LightningModule):
    """Two layers with BatchNorm and dropout; a learning rate that changes with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(folder: Path, kills: Sequence[tuple[int, Kill]] = (), life: int = 0) -> dict[str, str]:
    """Two fits of one module and a test of what came out; gives the digests of what they ended with.

    The first saves itself every 7 steps, the second leaves it to lockstep; both average weights.

    Args:
        folder: for checkpoints.
        kills: in which fit each life is to end, and when.
        life: the number of this one.
    """
    seed_everything(7, workers=True, verbose=False)
    rows = torch.randn(62, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows, (rows.sum(1) > 0).long())
    module, found = Net(), {}
    for number in (1, 2):
        keep = [ModelCheckpoint(folder / "kept", every_n_train_steps=7)] if number == 1 else []
        ends = [KillAt(kill) for fit, kill in kills[life : life + 1] if fit == number]
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=3,
            callbacks=[MovingAverage(0.9), *keep, *ends],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=bool(keep),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        result = trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
        shown = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found[f"fit{number}"] = (result.stopped, result.metrics, result.epochs, result.global_step, shown)
    tested = trainer.test(module, DataLoader(data, batch_size=4), verbose=False)
    states = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "metrics": (found, tested, torch.rand(3)),
    }
    return {name: digest(state) for name, state in states.items()}


def main() -> None:
    """Rank 0 tells what it ended with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", action="append", default=[], help="FIT:rank=1,step=9, one for each life")
    args = parser.parse_args()
    kills = [(int(text[0]), Kill.parse(text[2:])) for text in args.kill]
    for name, value in train(args.folder, kills, int(os.environ["TORCHELASTIC_RESTART_COUNT"])).items():
        if os.environ["RANK"] == "0":
            print(f"digest of {name}: {value}", flush=True)


if __name__ == "__main__":
    main()
