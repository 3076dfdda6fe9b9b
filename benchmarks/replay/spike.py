"""The small GPT of examples/, on a text with three pieces of a binary file: a loss that spikes once.

python spike.py --ranks 2 --die-at 12      # dies at step 12, as if killed
python spike.py --ranks 2                  # resumes, and trains the rest
"""

import argparse
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from language_model import ByteCorpus, LanguageModel

from lockstep import Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint

BLOCK, BATCH, PLACES = 64, 16, (707, 708, 711)


class Dying(LanguageModel):
    """The language model, in a process that dies at a step of its first attempt."""

    def __init__(self, die_at: int) -> None:
        super().__init__(lr=5e-3, layers=2, heads=2, width=64, block=BLOCK)
        self.die_at = die_at

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.die_at and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def corpus() -> ByteCorpus:
    """Python's library, in which three pieces were overwritten by a binary file."""
    text = bytearray(ByteCorpus.standard_library(0.2))
    noise = random.Random(0)
    for place in PLACES:
        text[place * BLOCK : (place + 1) * BLOCK] = noise.randbytes(BLOCK)
    return ByteCorpus(bytes(text), BLOCK)


class PrintedLosses(ModelCheckpoint):
    """Checkpoints every 8 steps, and a line for each step."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        # the loss of the previous step, whose mean over the ranks was published after it
        if trainer.is_global_zero and "train_loss" in trainer.callback_metrics:
            print(f"step {trainer.global_step - 1}: loss {trainer.callback_metrics['train_loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--die-at", type=int, default=-1)
    options = parser.parse_args()
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp",
        max_steps=48,
        log_every_n_steps=1,
        callbacks=[PrintedLosses("run", every_n_train_steps=8, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(corpus(), batch_size=BATCH // options.ranks)
    trainer.fit(Dying(options.die_at), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
