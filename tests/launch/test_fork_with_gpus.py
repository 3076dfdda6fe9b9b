"""On a machine with GPUs a process can be forked although it has asked whether there are any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.environment import BY_NVML, ask_nvml
from tests.tools.fresh import PYTHONPATH

SCRIPT = """
import os
import torch

asked = []


def is_available():  # as torch's where there is a driver: without NVML it starts CUDA, and marks forks as bad
    if os.getenv("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
        asked.append(os.getpid())
    return False


torch.cuda.is_available = is_available
torch.cuda._is_in_bad_fork = lambda: bool(asked) and os.getpid() not in asked
from tests.loop.pieces import Slope, numbers, quiet

if __name__ == "__main__":
    trainer = quiet(accelerator="auto", devices=2, strategy="ddp_fork", max_steps=2)
    trainer.fit(Slope(), numbers(8, 2))
    print("fitted", trainer.global_step)
"""


@pytest.mark.parametrize("users", [None, "0"])
def test_nvml_is_asked_unless_the_user_says_otherwise(users: str | None) -> None:
    environ = {} if users is None else {BY_NVML: users}
    ask_nvml(environ)
    assert environ == {BY_NVML: users or "1"}


@pytest.mark.slow
def test_ranks_are_forked_where_there_are_gpus(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name != BY_NVML} | {"PYTHONPATH": PYTHONPATH}
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, env=environ)
    assert "fitted 2" in found.stdout, found.stderr
