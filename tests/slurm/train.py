"""What the SLURM jobs of the tests run: digits on all ranks of the job, told step by step in a file."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.digits import Classifier, Digits
from lockstep import Callback, Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint


class BatchLog(Callback):
    """A line for each step: the attempt, the step, and how many ranks there are; from rank 0."""

    def __init__(self, path: Path, pause: float) -> None:
        self.path, self.pause = path, pause

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            life = os.environ.get("SLURM_RESTART_COUNT", "0")
            with self.path.open("a") as file:
                file.write(f"{life} {trainer.global_step} {trainer.world_size} {os.environ['SLURMD_NODENAME']}\n")
        time.sleep(self.pause)


def main() -> None:
    """Train; rank 0 writes the hash of the weights at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", default="auto", type=lambda text: int(text) if text.isdigit() else text)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--every", type=int, default=0, help="steps from one checkpoint to the next")
    args = parser.parse_args()
    seed_everything(1, workers=True)
    keep = [ModelCheckpoint(args.out / "kept", every_n_train_steps=args.every, save_top_k=1)] if args.every else []
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        max_steps=args.steps,
        default_root_dir=args.out,
        logger=False,
        enable_checkpointing=bool(keep),
        enable_progress_bar=False,
        callbacks=[BatchLog(args.out / "history", args.pause), *keep],
    )
    model = Classifier(10)
    trainer.fit(model, datamodule=Digits(1))
    if trainer.is_global_zero:
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        (args.out / "weights").write_text(hashlib.sha256(weights).hexdigest())
        accuracy = trainer.callback_metrics.get("val_accuracy", float("nan"))  # of the last epoch that was whole
        print(f"rank 0 of {trainer.world_size}, accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
