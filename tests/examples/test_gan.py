"""The GAN example: two optimizers that are stepped by hand train on two ranks what they train on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "gan.py"


def test_two_ranks_train_what_one_trains(ranks: RankPool, tmp_path: Path) -> None:
    losses, images = [], []
    for devices in (1, 2):
        flags = (f"--devices={devices}", "--epochs=2")
        done = run_script(ranks, SCRIPT, *flags, folder=tmp_path, world=devices, launched=devices > 1, timeout=100)
        assert [each.returncode for each in done] == [0] * devices, done[0].stderr
        first, *image = done[0].stdout.splitlines()
        losses.append([float(value) for value in re.findall(r"\d\.\d+", first)])
        images.append(image)
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)  # float32, and sums in another order
    assert len(images[0]) == 8
