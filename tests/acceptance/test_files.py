"""Files that somebody else has broken: a rank that is killed in its write, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from tests.launch.sessions import Watched
from tests.loop.pieces import quiet

SCRIPT = Path(__file__).with_name("saves.py")


class Net(LightningModule):
    """The module of saves.py."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.steps: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps.append(self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_folder_that_is_written_again_holds_when_a_rank_dies_in_its_write(tmp_path: Path) -> None:
    """torch's writer alone loses both: the parts are the second save's, and the index is the first one's."""
    run = Watched(SCRIPT, tmp_path, "dies", "last.ckpt")
    assert "dies in a write" in run.lines
    assert run.code != 0
    module = Net()
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    quiet(max_epochs=1).fit(module, loader, ckpt_path=tmp_path / "last.ckpt")
    assert module.steps == [2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs namespaces")
def test_a_full_disk_is_told_as_the_failure_of_who_wrote(tmp_path: Path) -> None:
    """Rank 1 waits in a collective when rank 0 fails, and was named."""
    full = tmp_path / "full"
    full.mkdir()
    mount = f"mount -t tmpfs -o size=4m none {full}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    command = f"{mount} && exec {sys.executable} {SCRIPT} 'fills the disk' {full}"
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("lockstep: rank 0 failed first, at ")
    assert "No space left on device" in last
