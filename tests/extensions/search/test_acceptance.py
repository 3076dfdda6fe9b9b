"""Searches by the names that users have: a broken journal, and options of sbatch."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lockstep import HyperOptArgumentParser, SlurmCluster


def rate_of(hparams: Any) -> float:
    return float(hparams.rate)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("optuna") is None, reason="needs optuna")
def test_a_torn_line_of_a_study_costs_no_trial(tmp_path: Path) -> None:
    """A worker is killed in its write; Optuna's own reader fails for ever behind such a line."""
    parser = HyperOptArgumentParser(strategy="optuna", mode="min", seed=1)
    parser.opt_range("--rate", type=float, low=0.0, high=1.0, tunable=True)
    search = parser.parse_args([])
    first = search.optimize_parallel(rate_of, nb_trials=1, nb_workers=1, log_path=str(tmp_path))
    journal = tmp_path / "study.journal"
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "tri')
    both = search.optimize_parallel(rate_of, nb_trials=2, nb_workers=1, log_path=str(tmp_path))
    assert [each.state for each in both] == ["completed", "completed"]
    assert both[0].value == first[0].value
    assert all(line.endswith(b"}") for line in journal.read_bytes().splitlines())


@pytest.mark.parametrize("value", [1, 1.0, 2])
def test_an_option_of_sbatch_keeps_the_number_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """``1 in (None, "", True)``: the option had no value."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}")
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)  # some runners have none
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    parser = HyperOptArgumentParser(strategy="grid_search")
    parser.opt_list("--layers", default=1, type=int, options=[1], tunable=True)
    cluster = SlurmCluster(parser.parse_args([]), log_path=str(tmp_path / "search"))
    cluster.add_slurm_cmd("nice", value)
    cluster.optimize_parallel_cluster_cpu(print, nb_trials=1, job_name="one")
    (job,) = (tmp_path / "search").rglob("*.sh")
    assert f"#SBATCH --nice={value}\n" in job.read_text()
