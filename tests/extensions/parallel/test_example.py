"""The example of a hand-written loop: started in every way, it gives the numbers of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.launch.environment import free_port
from tests.tools.fresh import python

SCRIPT = str(Path(__file__).resolve().parents[3] / "examples" / "distributed.py")
RUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
LAUNCH = ["-m", "torch.distributed.launch", "--use-env", "--nproc-per-node", "3", "--master-port"]


def losses(*words: str) -> list[float]:
    """What the script prints, epoch by epoch."""
    done = python(*words, "--epochs", "2", seconds=150)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+)$", done.stdout, re.M)]


def expected() -> list[float]:
    found = losses(SCRIPT)
    assert len(found) == 2
    assert found[1] < found[0]
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_gives_the_numbers_of_one_process() -> None:
    assert losses(*RUN, SCRIPT) == pytest.approx(expected(), rel=1e-11)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_launch_module_and_spawn_do() -> None:
    right = expected()
    assert losses(*LAUNCH, str(free_port()), SCRIPT) == pytest.approx(right, rel=1e-11)
    assert losses(SCRIPT, "--spawn", "2") == pytest.approx(right, rel=1e-11)
