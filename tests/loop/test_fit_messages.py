"""What a fit says of itself by the logger ``lockstep``, and how it is silenced."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lockstep.loggers import CSVLogger
from lockstep.testing import BoringModel
from lockstep.testing.models import RandomDataset
from tests.loop.pieces import quiet
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool

STUDY = """
import logging
{before}
import torch
from lockstep import Trainer, seed_everything
{after}
from lockstep.testing import BoringModel
for trial in range(3):
    seed_everything(trial)
    off = dict(enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False)
    Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, **off).fit(BoringModel())
"""


def data() -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, 8))


def test_the_first_line_says_devices_strategy_precision_and_folder(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO, "lockstep"):
        trainer = quiet(max_steps=1, logger=CSVLogger(tmp_path), precision="bf16-mixed")
        trainer.fit(BoringModel(), data())
    assert caplog.messages[0] == (
        f"trainer.fit: 1 x cpu, SingleDeviceStrategy, bf16-mixed, files in {tmp_path}/lightning_logs/version_0"
    )
    assert caplog.messages[-1] == "trainer.fit ended: max_steps=1 reached."


SET = 'logging.getLogger("{name}").setLevel(logging.{level})'


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("", "", 3),  # the seeds; with bar, summary and logger off a fit says nothing: it said two lines
        (SET.format(name="lockstep", level="WARNING"), "", 0),  # the level was lost if it was set before the import
        ("", SET.format(name="lockstep", level="WARNING"), 0),
        ("", SET.format(name="lightning.pytorch", level="ERROR"), 0),
        ("", SET.format(name="lockstep", level="DEBUG"), 12),
        # beside Lightning, which gives its loggers this level, nothing of level DEBUG was shown
        (SET.format(name="lightning.pytorch", level="INFO"), SET.format(name="lockstep", level="DEBUG"), 12),
    ],
)
def test_a_study_printed_two_lines_for_each_fit(
    before: str, after: str, lines: int, ranks: RankPool, tmp_path: Path
) -> None:
    script = tmp_path / "study.py"
    script.write_text(STUDY.format(before=before, after=after))
    (done,) = run_script(ranks, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == lines, done.stderr
