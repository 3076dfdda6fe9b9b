"""A rank that keeps others waiting is named, where the others wait in a line such as ``loss.item()``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.conftest import PATH
from tests.accelerator.madeup import missing
from tests.tools.fresh import python

SCRIPT = """
import time, torch
from torch.utils.data import DataLoader
from lockstep import LightningModule, Trainer

class Late(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if batch_idx == 3 and self.global_rank == 1:
            time.sleep(8)
        loss.item()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    Trainer(accelerator="madeup", devices=2, strategy="ddp", max_epochs=1, hang_timeout=2, **quiet).fit(
        Late(), DataLoader(torch.ones(24, 8), 2)
    )
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "has it")
def test_a_rank_for_which_a_devices_queue_waits_is_named(tmp_path: Path) -> None:
    """Nothing was said: the call had returned, and the rank was in a line of the user's."""
    script = tmp_path / "late.py"
    script.write_text(SCRIPT)
    found = python(script, seconds=90, PYTHONPATH=PATH)
    assert found.returncode == 0, found.stderr
    told = next(line for line in found.stderr.splitlines() if line.startswith("lockstep: for "))
    assert "rank 1 is in its own code, " in told
    assert "rank 0 waits in all_reduce #" in told
    assert "(queued on its device)" in told
