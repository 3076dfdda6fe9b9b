"""A training script whose ranks wait for one another in groups, or take different layers: for test_supervision.py."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.strategies import FSDPStrategy

what = sys.argv[1]
SECONDS = 7.0


def now():
    """The test measures from here."""
    print(f"now {time.monotonic():.2f}", flush=True)


class InGroups(LightningModule):
    """Ranks 0 and 1 are a group, and 1 and 2: rank 1 is busy, and the others wait for it in different calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.groups = nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        if not self.groups:
            self.groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        if batch_idx == 3:
            rank = self.global_rank
            if rank == 1:
                now()
                time.sleep(SECONDS)  # busy
            if rank in (0, 1):
                dist.all_reduce(torch.ones(1), group=self.groups[0])
            if rank in (1, 2):
                dist.barrier(group=self.groups[1])
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SkipsALayer(LightningModule):
    """Layers in a loop, one of which rank 1 does not take in one batch: the line is the same on both ranks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 + 2 * size, 6 + 2 * size) for size in range(3))
        self.other = nn.Linear(4, 8)

    def training_step(self, batch, batch_idx):
        x, layers = batch[0], [*self.layers]
        if batch_idx == 2 and self.global_rank == 1:
            now()
            layers = [self.other, self.layers[2]]
        for layer in layers:
            x = layer(x)  # layer
        return x.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


skips = what == "layers"
trainer = Trainer(
    accelerator="cpu",
    devices=2 if skips else 3,
    strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}) if skips else "ddp",
    max_epochs=1,
    hang_timeout=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
x = torch.randn(18, 4) if skips else torch.randn(18, 1)
trainer.fit(SkipsALayer() if skips else InGroups(), DataLoader(TensorDataset(x), batch_size=2 if skips else 1))
print("ended", trainer.global_rank, flush=True)
