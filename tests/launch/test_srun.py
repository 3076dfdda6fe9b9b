"""A batch script without srun: this process becomes srun, with the same command line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.script import STARTED, arguments, become_srun
from tests.cluster.variables import BATCH, without
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool

SCRIPT = """
import sys
from lockstep import Trainer
print("before the Trainer")
sys.argv.append("more")
Trainer(accelerator="cpu", devices={devices}, num_nodes=2)
print("after the Trainer")
"""
FAKE = """#!/bin/sh
echo "srun of job $LOCKSTEP_SRUN with $NCCL_DEBUG: $*"
exit 5
"""


def run(ranks: RankPool, folder: Path, devices: int) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT.format(devices=devices))
    (folder / "srun").write_text(FAKE)
    (folder / "srun").chmod(0o755)
    environ = {**BATCH, "PATH": f"{folder}:{os.environ['PATH']}", "NCCL_DEBUG": "INFO"}
    (done,) = run_script(ranks, folder / "train.py", "--lr", "0.1", folder=folder, environ=environ)
    return done


def test_the_script_is_started_by_srun(ranks: RankPool, tmp_path: Path) -> None:
    done = run(ranks, tmp_path, 2)
    assert done.returncode == 5, done.stderr  # srun's code is the script's
    first, second = done.stdout.splitlines()
    assert first == "before the Trainer"
    assert second.startswith("srun of job 7 with INFO: --kill-on-bad-exit=1 --export=ALL ")
    assert second.endswith(f"{tmp_path / 'train.py'} --lr 0.1")
    assert "SLURM job 7 has 4 tasks" in done.stderr


def test_processors_of_a_task_are_handed_on() -> None:
    """srun does not take them from the job since SLURM 22.05."""
    words = arguments("srun", ["python", "a.py"], {**BATCH, "SLURM_CPUS_PER_TASK": "4"})
    assert words == ["srun", "--kill-on-bad-exit=1", "--export=ALL", "--cpus-per-task=4", "python", "a.py"]
    assert "--ntasks-per-node=1" in arguments("srun", ["python"], without(BATCH, "SLURM_NTASKS"))


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**BATCH, "PATH": "/nowhere"}, "SLURM job 7 has SLURM_NTASKS=4, but srun.* is not on PATH"),
        ({**BATCH, STARTED: "7"}, "is not one of its tasks.*start the script with srun yourself"),
    ],
)
def test_where_srun_cannot_be_started(environ: dict[str, str], says: str) -> None:
    with pytest.raises(MisconfigurationException, match=says):
        become_srun(environ)
