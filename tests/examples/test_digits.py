"""The digits example: it learns, and sharing the work out does not change the numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.in_rank import run_script
from tests.tools.fresh import python
from tests.tools.pool import RankPool

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


def digits(folder: Path, *flags: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Runs the example; what it printed by label, and the metrics of each epoch."""
    done = python(SCRIPT, "--out", folder, *flags, seconds=150)
    assert done.returncode == 0, done.stderr
    epochs = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    return said(done.stdout), epochs


def said(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^(steps|accuracy, held out|sha256 of the weights)\s+(\S+)", printed, re.M))


@pytest.mark.timeout(160)
def test_two_processes_end_in_the_bits_of_one_with_accumulation(ranks: RankPool, tmp_path: Path) -> None:
    two = run_script(ranks, SCRIPT, "--devices=2", "--epochs=1", folder=tmp_path, world=2, launched=True, timeout=140)
    (one,) = run_script(ranks, SCRIPT, "--devices=1", "--accumulate=2", "--epochs=1", folder=tmp_path)
    assert [done.returncode for done in (*two, one)] == [0, 0, 0], two[0].stderr + one.stderr
    assert said(two[0].stdout) == said(one.stdout)
    assert said(one.stdout).keys() == {"steps", "accuracy, held out", "sha256 of the weights"}
    assert said(one.stdout)["steps"] == "22"
    assert said(two[1].stdout) == {}  # rank 0 speaks for all


@pytest.mark.slow
@pytest.mark.timeout(160)
def test_two_processes_that_it_starts_itself_end_in_the_bits_of_one(tmp_path: Path) -> None:
    two, _ = digits(tmp_path / "two", "--devices", "2", "--epochs", "2")
    one, _ = digits(tmp_path / "one", "--devices", "1", "--accumulate", "2", "--epochs", "2")
    assert two["steps"] == one["steps"] == "44"
    assert two["sha256 of the weights"] == one["sha256 of the weights"]


@pytest.mark.slow
@pytest.mark.timeout(160)
def test_float64_metrics_agree_to_1e_12_at_every_epoch(tmp_path: Path) -> None:
    flags = ("--precision", "64-true", "--epochs", "2")
    _, two = digits(tmp_path / "two", "--devices", "2", *flags)
    _, one = digits(tmp_path / "one", "--devices", "1", "--accumulate", "2", *flags)
    assert [set(epoch) for epoch in one] == [{"epoch", "train_loss", "val_loss", "val_accuracy"}] * 2
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_whole_run_reaches_97_percent_with_equal_bits(tmp_path: Path, strategy: str) -> None:
    two, _ = digits(tmp_path / "two", "--devices", "2", "--strategy", strategy)
    one, _ = digits(tmp_path / "one", "--devices", "1", "--accumulate", "2")
    assert two["sha256 of the weights"] == one["sha256 of the weights"]
    assert float(two["accuracy, held out"]) >= 0.97


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_whole_run_in_float64_agrees_to_1e_12_at_every_epoch(tmp_path: Path) -> None:
    _, two = digits(tmp_path / "two", "--devices", "2", "--precision", "64-true")
    _, one = digits(tmp_path / "one", "--devices", "1", "--accumulate", "2", "--precision", "64-true")
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-12)
