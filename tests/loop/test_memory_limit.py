"""A model of three times the memory that each rank may have: FSDP trains, saves and resumes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import hashlib
import resource
from pathlib import Path

import torch
import torch._dynamo  # before memory is limited
from torch import nn
from torch.distributed.fsdp import fully_shard  # noqa: F401  # the same
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.checkpoint import dcp  # noqa: F401  # the same
from lockstep.engines.sharded import sharded_init
from lockstep.strategies import FSDPStrategy

WIDTH, BLOCKS = 1250, 160
WHOLE = 4 * WIDTH * WIDTH * BLOCKS
sharded_init.BUDGET = 2**22  # what stays whole while the model is built


class Block(nn.Module):
    """Its weights are frozen, as those of a large model whose scales are tuned."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.inner(x) * self.scale


class Large(LightningModule):
    def configure_model(self):
        used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + WHOLE // 3, resource.RLIM_INFINITY))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def on_train_end(self):
        moved = (self.blocks[0].scale.full_tensor() - 1).abs().max()
        self.print(f"moved {float(moved.detach()) > 0}")  # in one piece: ranks write into one pipe
        print(self.trainer.memory(), flush=True)
        digest = hashlib.sha256()
        for block in self.blocks:
            for parameter in block.parameters():
                digest.update(parameter.detach().to_local().numpy())
        print(f"bits of rank {self.global_rank}: {digest.hexdigest()}", flush=True)

    def configure_optimizers(self):
        return torch.optim.Adam([block.scale for block in self.blocks])


trainer = Trainer(
    accelerator="cpu",
    devices=4,
    strategy=FSDPStrategy(state_dict_type="sharded"),
    max_steps=2,
    callbacks=ModelCheckpoint("saved", every_n_train_steps=1, save_top_k=-1),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
saved = [str(path) for path in Path("saved").glob("*step=1.ckpt")] or [None]
torch.manual_seed(0)
trainer.fit(Large(), DataLoader(TensorDataset(torch.randn(32, WIDTH)), batch_size=2), ckpt_path=saved[0])
print(f"steps of rank {trainer.global_rank}: {trainer.global_step}; from {saved[0]}", flush=True)
'''


def run(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "large.py"
    script.write_text(SCRIPT)
    # glibc keeps what it has once had from the system, unless it is told otherwise
    given = ["MALLOC_TRIM_THRESHOLD_=0", "MALLOC_MMAP_THRESHOLD_=65536", "MALLOC_ARENA_MAX=1"]
    command = ["env", *given, sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=840)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_fsdp_trains_saves_and_resumes_what_no_rank_could_hold(tmp_path: Path) -> None:
    """The run that resumes makes the second step of the first one again, to the same bits."""
    bits = []
    for _ in range(2):
        done = run(tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "moved True" in done.stdout
        bits.append(sorted(re.findall(r"bits of rank \d: [0-9a-f]{64}", done.stdout)))
        (folder,) = (tmp_path / "saved").glob("*step=1.ckpt")
        assert sum(file.stat().st_size for file in folder.iterdir()) > 4 * 1250 * 1250 * 160
    assert f"steps of rank 0: 2; from {folder.relative_to(tmp_path)}" in done.stdout
    assert len(bits[0]) == 4
    assert bits[0] == bits[1]
