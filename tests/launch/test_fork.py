"""``strategy="ddp_fork"``: a call in copies of this process."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cluster.world import World
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch import spawn
from lockstep.launch.environment import BY_NVML, ask_nvml
from lockstep.launch.spawn import ForkLauncher, obstacle
from tests.launch.forks import weights_of_a_rank
from tests.tools.fresh import PYTHONPATH, python
from tests.tools.pool import RankPool

SCRIPT = Path(__file__).with_name("forks.py")
TWO = World(0, 2, 0, 2, 0, 1, "127.0.0.1", 0)


def test_a_script_that_has_done_all_that_makes_forks_hang(tmp_path: Path, ranks: RankPool) -> None:
    # threads that spin would take the processors from other tests
    done = python(SCRIPT, tmp_path, folder=tmp_path, seconds=110, OMP_WAIT_POLICY="passive", PYTHONPATH=PYTHONPATH)
    assert done.returncode == 0, done.stderr
    words, found = done.stdout.split("found: ")
    assert words == "said before the fork\n"  # once: what waited to be written has not been copied
    assert found.splitlines()[1:] == ["the script ends"]  # nor is what the script does at its end done by the ranks
    found = json.loads(found.splitlines()[0])

    # a module and a callback with locks and lambdas: the trained one is back, and has its own lock
    assert found["metrics"] == ["loss", "loss_epoch", "loss_step"]
    assert (found["seen"], found["threads"], found["rank"]) == (10, 2, 0)
    assert found["usable"] is True
    assert found["predicted"] == [[0, 1], [2, 3], [4, 5], [6]]  # as one process gives it: all samples, in order
    assert found["predicted by loader"] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert found["rows"] == 4  # the names, one from before, two epochs
    forked = torch.load(tmp_path / "forked.pt")
    for weights in ranks(2).run(weights_of_a_rank, str(tmp_path), timeout=60):
        assert all(torch.equal(forked[name], value) for name, value in weights.items())

    # how it ends
    assert found["raised"][0] == "RuntimeError"
    assert found["raised"][1].startswith("strategy='ddp_fork': rank 1 failed first, at ")
    assert re.search(r"forks\.py:\d+: ValueError: a bad batch$", found["raised"][1])
    assert "rank 1 (process " in found["killed"][1]
    assert "was killed by SIGKILL" in found["killed"][1]
    assert found["interrupted"] == ["interrupted=True", "0 epochs"]
    assert found["group"][0] == "MisconfigurationException"
    assert "it has a process group" in found["group"][1]
    assert found["left"] == []


def test_a_rank_is_as_a_fresh_process() -> None:
    here = os.getpid()

    def look() -> Any:
        import multiprocessing

        handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        return handlers, multiprocessing.active_children(), os.getppid() == here, signal.set_wakeup_fd(-1)

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(writing)
    try:
        found = ForkLauncher(TWO).launch(look)
    finally:
        signal.set_wakeup_fd(before[1])
        signal.signal(signal.SIGTERM, before[0])
        os.close(reading)
        os.close(writing)
    assert found == ((signal.SIG_DFL, signal.default_int_handler), [], True, -1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"can_fork": False}, "does not support forks: use strategy='ddp_spawn'"),
        ({"cuda": True}, "it has used CUDA.* use strategy='ddp_spawn'"),
        ({"threads": ["python", "pt_autograd_0"]}, "it has run a backward .*GPUs.* use strategy='ddp_spawn'"),
        ({"group": True}, r"process group.*destroy_process_group\(\).* use strategy='ddp_spawn'"),
    ],
)
def test_what_cannot_be_copied_is_refused(wrong: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fine: dict[str, Any] = {"can_fork": True, "cuda": False, "group": False, "threads": ["python", "pt_gloo_runloop"]}
    assert obstacle(**fine) is None
    reason = obstacle(**{**fine, **wrong})
    monkeypatch.setattr(spawn, "why_not", lambda: reason)
    with pytest.raises(MisconfigurationException, match=f"strategy='ddp_fork' forks .*process, but .*{says}"):
        ForkLauncher(TWO).launch(print)


def test_cuda_that_only_a_copy_finds_broken_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(spawn, "is_there", lambda kind: kind == "cuda")
    with pytest.raises(RuntimeError, match=r"'ddp_fork': rank \d failed first.*it has used CUDA.*'ddp_spawn'"):
        ForkLauncher(TWO).launch(print)


def test_a_build_for_cuda_on_a_machine_without_a_gpu_copies_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused: to count the GPUs marks every copy as bad, also where there are none."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(spawn, "is_there", lambda kind: False)
    ForkLauncher(TWO).launch(print)


WITH_GPUS = """
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


@pytest.mark.slow
def test_a_process_that_has_asked_whether_there_are_gpus_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "forks.py"
    script.write_text(WITH_GPUS)
    monkeypatch.delenv(BY_NVML, raising=False)
    found = python(script, folder=tmp_path, seconds=100, PYTHONPATH=PYTHONPATH)
    assert "fitted 2" in found.stdout, found.stderr


@pytest.mark.parametrize("users", [None, "0"])
def test_nvml_is_asked_unless_the_user_says_otherwise(users: str | None) -> None:
    environ = {} if users is None else {BY_NVML: users}
    ask_nvml(environ)
    assert environ == {BY_NVML: users or "1"}
