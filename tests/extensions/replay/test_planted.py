"""30 bad samples, planted in runs on one and several ranks, and found by `lockstep replay` at their place."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule, Trainer, seed_everything
from lockstep.cli.run import main

pytestmark = pytest.mark.timeout(300)

SCRIPT = str(Path(__file__).with_name("planted.py"))


def train(folder: Path, *words: str) -> None:
    """Run the script, which may end with an error once the weights are not finite."""
    subprocess.run([sys.executable, SCRIPT, *words], cwd=folder, capture_output=True, timeout=120, check=False)


def places(samples: int, steps: int) -> list[int]:
    """The indices in the order in which a run with the script's seed reads them, in batches of 8."""
    found: list[int] = []

    class Reader(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            found.extend(batch.tolist())
            return self.w * 0.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    seed_everything(1, verbose=False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, barebones=True)
    trainer.fit(Reader(), DataLoader(range(samples), batch_size=8, shuffle=True))  # type: ignore[arg-type]
    return found


def first_bad_step(folder: Path) -> int:
    """The first step whose loss is not finite, else the step with the largest one, as a curve would show it."""
    losses: dict[int, list[float]] = defaultdict(list)
    for file in folder.glob("losses-*.txt"):
        for line in file.read_text().splitlines():
            step, loss = line.split()
            losses[int(step)].append(float(loss))
    broken = [step for step, values in losses.items() if not all(map(math.isfinite, values))]
    return min(broken, default=0) or max(losses, key=lambda step: max(losses[step]))


RUNS = {
    "one process": [],
    "ddp on 2 ranks": ["--ranks", "2", "--strategy", "ddp"],
    "ddp on 4 ranks": ["--ranks", "4", "--strategy", "ddp"],
    "fsdp on 2 ranks": ["--ranks", "2", "--strategy", "fsdp"],
    "accumulation": ["--accumulate", "2"],
    "accumulation on 2 ranks": ["--ranks", "2", "--strategy", "ddp", "--accumulate", "2"],
    "a resume": ["--ranks", "2", "--strategy", "ddp", "resumed"],
    "a stream": ["--stream"],
    "a stream on 2 ranks": ["--stream", "--ranks", "2", "--strategy", "ddp"],
    "a million samples": ["--samples", "1000000", "--ranks", "2", "--strategy", "ddp"],
}
STEPS = {"pixel": 13, "label": 9, "text": 11}
"""The step that reads the bad sample, by its kind."""


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("run", RUNS)
def test_a_planted_sample_is_found(
    run: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", kind, *RUNS[run]]
    samples = 1_000_000 if "--samples" in words else 1000
    number = STEPS[kind] * 8 + 5
    place = number if "--stream" in words else places(samples, STEPS[kind] + 1)[number]
    words += ["--place", str(place)]
    if "resumed" in words:
        words.remove("resumed")
        train(tmp_path, *words, "--steps", "7")
    train(tmp_path, *words)
    step = first_bad_step(tmp_path)
    assert step == STEPS[kind]

    monkeypatch.chdir(tmp_path)
    assert main(["replay", "checkpoints", "--step", str(step), "--save", "window.pt"]) == 0
    report = capfd.readouterr().out
    samples_of_step = torch.load("window.pt")["samples"]
    assert len(samples_of_step) == 8
    assert samples_of_step[0]["place"] == place, report
    if kind != "label":
        assert "first not finite" in report
    others = [sample["gradient"] for sample in samples_of_step[1:]]
    assert all(map(math.isfinite, others))
