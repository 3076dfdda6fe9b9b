"""A small training script, and changes of it: each makes it wrong in one way, or right in another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.extensions.verify.certificate import Certificate

SCRIPTS = Path(__file__).parent / "scripts"
Certify = Callable[..., Certificate]
"""The fixture that verifies a script."""

SCRIPT = """\
import os, random
import torch, torch.distributed as dist
from torch import nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset


def make_data(n=96):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :1] * x[:, 1:2] + x[:, 2:3])


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = make_data()
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""

LOOP = SCRIPT[SCRIPT.index("for epoch") : SCRIPT.index("dist.destroy")]
MODEL = "DistributedDataParallel(make_model())"
LOSS = "F.mse_loss(model(x), y)"
SHARED_OUT = """\
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
"""
SET_EPOCH = "    sampler.set_epoch(epoch)\n"
STEP = "        optimizer.step()\n"

LOCKSTEP = """\
import lockstep, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch, i):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
x = torch.randn(150, 8)
loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), 10, shuffle=True)
flags = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=2)
trainer = lockstep.Trainer(
    accelerator="cpu", devices=2, strategy="fsdp", precision="bf16-mixed", gradient_clip_val=0.5, **flags
)
trainer.fit(Net(), loader)
"""
"""Another script, of lockstep's Trainer with sharded parameters."""

Changes = tuple[tuple[str, str], ...]


def replaced(text: str, *changes: tuple[str, str]) -> str:
    """A script with some of its text replaced."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def changed(*changes: tuple[str, str]) -> str:
    """The script with some of its text replaced."""
    return replaced(SCRIPT, *changes)


def line_of(text: str, part: str) -> int:
    """The number of the first line with a part."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)
