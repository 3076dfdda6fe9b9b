"""Ranks that real launchers start: torchrun, Open MPI's mpirun, and a hand on each of two nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch.environment import free_port
from tests.launch.sessions import kill
from tests.scripts.in_rank import run_script
from tests.tools.fresh import PYTHONPATH
from tests.tools.pool import RankPool

SCRIPT = """
import os, sys
from tests.loop.pieces import Slope, numbers, quiet
trainer = quiet(max_epochs=1, **eval(sys.argv[1]))
module = Slope(lr=0.01)
trainer.fit(module, numbers(8))
world = trainer.strategy.world
line = (world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.num_nodes,
        type(trainer.strategy).__name__, round(module.w.item(), 9), os.environ.get("NCCL_DEBUG"))
os.write(1, (" ".join(map(str, line)) + "\\n").encode())  # in one piece: two ranks share the pipe
"""


_begun: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _none_goes_on() -> Iterator[None]:
    """What a test has begun ends with it, and all that this has started."""
    yield
    while _begun:
        process = _begun.pop()
        kill(process.pid)
        process.communicate()


def start(folder: Path, words: list[str], flags: str = "{}", **environ: str) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "NCCL_DEBUG": "WARN", **environ}
    command = [*words, str(script), flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environ, text=True, start_new_session=True, **pipes)
    _begun.append(process)
    return process


def said(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return sorted(out.splitlines())


def lines(*places: str) -> list[str]:
    """Two ranks share samples 1 .. 8 one by one: the mean of each window is 1.5, 3.5, 5.5, 7.5."""
    weight = -0.01 * (1.5 + 3.5 + 5.5 + 7.5)
    return [f"{place} DDPStrategy {weight} WARN" for place in places]


TWO = ("0 2 0 2 0 1", "1 2 1 2 0 1")


@pytest.mark.slow  # the ranks of the pool, every day, find the variables that torchrun sets
def test_torchrun(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert said(start(tmp_path, words)) == lines(*TWO)


MPIRUN = shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun (Debian: apt-get install openmpi-bin)")
WORDS = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]


@pytest.mark.slow
@needs_mpi
def test_mpirun(tmp_path: Path) -> None:
    assert said(start(tmp_path, WORDS, "{'devices': 2}")) == lines(*TWO)


def test_two_nodes_by_hand(ranks: RankPool, tmp_path: Path) -> None:
    """The same command on each; the strategy is ddp without being named."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NCCL_DEBUG": "WARN"}
    (tmp_path / "train.py").write_text(SCRIPT)
    nodes = [{**meeting, "NODE_RANK": str(node)} for node in (0, 1)]
    flags = "{'devices': 1, 'num_nodes': 2}"
    both = run_script(ranks, tmp_path / "train.py", flags, folder=tmp_path, world=2, environ=nodes)
    assert [done.returncode for done in both] == [0, 0], both[0].stderr + both[1].stderr
    assert [done.stdout.strip() for done in both] == lines("0 2 0 1 0 2", "1 2 0 1 1 2")


@pytest.mark.slow
def test_pods_by_rank_and_world_size(tmp_path: Path) -> None:
    """As Kubeflow's PyTorchJob starts them."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    both = [start(tmp_path, [sys.executable], RANK=str(rank), **meeting) for rank in (0, 1)]
    assert [*said(both[0]), *said(both[1])] == lines("0 2 0 1 0 2", "1 2 0 1 1 2")
