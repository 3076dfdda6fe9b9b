"""What the training scripts of test_hangs.py and test_misfortunes.py have in common."""

import os
import sys
import time

import torch
from torch.utils.data import Dataset

from lockstep import LightningModule

what, strategy, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
flags = {
    "accelerator": "cpu",
    "devices": 2,
    "strategy": strategy,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def now():
    """The test measures from here."""
    os.write(1, f"now {time.monotonic():.2f}\n".encode())


class Numbers(Dataset):
    """So many; one of them is not read as the others are."""

    def __init__(self, count, on_41=None):
        self.count, self.on_41 = count, on_41

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.on_41 is not None and index == 41:
            now()
            self.on_41()
        return torch.full((1,), float(index))


class Net(LightningModule):
    """A model of two parameters."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)
