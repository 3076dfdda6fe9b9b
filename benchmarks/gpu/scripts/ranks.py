"""A script of a user's that `scripts/gpu` starts: ranks that begin, are busy on the device, fall asleep, need too much.

python ranks.py CASE --device cuda --strategy ddp --timeout 3
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule, Trainer
from lockstep.testing import SharedCard

LONG = 60.0
"""Seconds that a rank is busy or asleep, if nobody says."""


class Net(LightningModule):
    """A few parameters, and a step in which something happens."""

    def __init__(self, case: str, seconds: float) -> None:
        super().__init__()
        self.case, self.seconds = case, seconds
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        if batch_idx == 3:
            os.write(1, f"rank {self.global_rank} is there\n".encode())  # whole, also where ranks write at once
            self.happen()
        self.seen = loss.item() if self.case == "asleep" else 0.0
        return loss

    def happen(self) -> None:
        if self.case == "busy":
            busy(self.device, self.seconds)
        elif self.case == "asleep" and self.global_rank == 1:
            time.sleep(self.seconds)  # asleep
        elif self.case == "memory":
            self.held = [torch.empty(2**40, dtype=torch.uint8, device=self.device)]  # memory

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def busy(device: torch.device, seconds: float) -> None:
    """Wait for a device that has this much to do."""
    if device.type != "cuda":
        time.sleep(seconds)
        return
    for _ in range(int(10 * seconds)):
        torch.cuda._sleep(150_000_000)  # cycles: about a tenth of a second
    torch.cuda.synchronize()


def main() -> None:
    """A fit of two ranks, or of as many as there are devices."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=["start", "busy", "asleep", "memory"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--own", action="store_true", help="a device for each rank")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=LONG)
    parser.add_argument("--timeout", type=float, default=60.0)
    args = parser.parse_args()
    accelerator: Any = "cpu"
    if args.device == "cuda":
        accelerator = "gpu" if args.own else SharedCard()
    trainer = Trainer(
        accelerator=accelerator,
        devices=args.devices,
        strategy=args.strategy if args.devices > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        hang_timeout=args.timeout,
    )
    trainer.fit(Net(args.case, args.seconds), DataLoader(torch.ones(64, 8), batch_size=4))  # type: ignore[arg-type]
    trainer.print("all done")


if __name__ == "__main__":
    main()
