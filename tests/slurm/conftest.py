"""The cluster of the tests marked slurm, started once where this machine can have one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, NoSlurm

TRAIN = Path(__file__).with_name("train.py")
PROJECT = TRAIN.parents[2]


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A SLURM of four nodes."""
    lab = Lab()
    try:
        lab.start(4)
    except NoSlurm as reason:
        pytest.skip(f"no slurm: {reason}")
    yield lab
    lab.stop()


@pytest.fixture
def slurm(lab: Lab, tmp_path: Path) -> Iterator[Lab]:
    """The cluster with all its nodes and no job; a test's folder can be seen by all nodes."""
    yield lab
    lab.mend()


def script(folder: Path, *lines: str, command: str, nodes: int = 2, tasks: int = 2) -> Path:
    """A batch script of the tests: this Python, one thread in each rank, output in ``folder/log``."""
    path = folder / "job.sh"
    source = os.pathsep.join((str(PROJECT / "src"), str(PROJECT)))
    head = [
        "#!/bin/bash",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --ntasks-per-node={tasks}",
        f"#SBATCH --output={folder}/log",
        "#SBATCH --open-mode=append",
        *[line for line in lines if line.startswith("#SBATCH")],
        f"export OMP_NUM_THREADS=1 PYTHONPATH={source} PATH={Path(sys.executable).parent}:$PATH",
        *[line for line in lines if not line.startswith("#SBATCH")],
    ]
    path.write_text("\n".join([*head, command, ""]))
    return path
