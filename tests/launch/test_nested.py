"""A run inside of a run's rank, by a process that has inherited the rank's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cluster.base import World
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.nested import RANK_OF, check_not_nested

RANK = World(1, 2, 1, 2, 0, 1, "127.0.0.1", 4000)


def test_a_rank_may_launch_again() -> None:
    environ = {"LOCAL_RANK": "1"}
    check_not_nested(RANK, environ)
    check_not_nested(RANK, environ)
    assert environ[RANK_OF] == f"{os.getpid()} 1/2 127.0.0.1:4000"


def test_another_process_with_its_variables_is_refused() -> None:
    environ = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", RANK_OF: "1 1/2 127.0.0.1:4000"}
    says = r"for rank 1 of 2 at 127.0.0.1:4000, and that is process 1, .*\(env -u LOCAL_RANK -u WORLD_SIZE \.\.\.\)"
    with pytest.raises(MisconfigurationException, match=says):
        check_not_nested(RANK, environ)


@pytest.mark.parametrize("other", ["1 1/2 127.0.0.1:4001", "1 0/4 127.0.0.1:4000", ""])
def test_a_launch_of_its_own_is_none(other: str) -> None:
    """torchrun or srun inside of a rank: its ranks have other numbers, or meet elsewhere."""
    check_not_nested(RANK, {RANK_OF: other})


def test_one_process_is_never_refused() -> None:
    environ = {RANK_OF: "1 0/1 127.0.0.1:0"}
    check_not_nested(World.single(), environ)
    assert environ == {RANK_OF: "1 0/1 127.0.0.1:0"}


@pytest.mark.slow
def test_a_script_that_starts_another_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import subprocess, sys
from tests.loop.pieces import Slope, numbers, quiet
class Module(Slope):
    def on_train_start(self):
        if self.global_rank == 1:
            done = subprocess.run([sys.executable, sys.argv[1]], stderr=subprocess.PIPE, text=True)
            print(done.stderr.splitlines()[-1])
quiet(strategy="ddp", devices=2, max_epochs=1).fit(Module(), numbers(2))
""")
    (tmp_path / "other.py").write_text(
        "from tests.loop.pieces import Slope, numbers, quiet\nquiet(max_epochs=1).fit(Slope(), numbers(2))\n"
    )
    project = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{project / 'src'}:{project}"}
    words = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "other.py")]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "this process takes itself for rank 1 of 2" in done.stdout
