"""Signals to a fit: acted on at a boundary, by all ranks together."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lockstep import Callback
from lockstep.callbacks import OnExceptionCheckpoint
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.scripts.in_rank import run_script
from tests.tools.fresh import PYTHONPATH, python
from tests.tools.pool import RankPool


class Kill(Callback):
    """Sends this process a signal in one batch, and counts the batches."""

    def __init__(self, at: int, number: int = signal.SIGTERM, rank: int = 0) -> None:
        self.at, self.number, self.rank, self.batches = at, number, rank, 0
        self.raised: list[str] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if self.batches == self.at and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.raised.append(type(exception).__name__)


def test_sigterm_ends_the_fit_at_the_next_boundary(tmp_path: Path) -> None:
    """In the middle of a window of three batches: the window is played to its end, then all is saved."""
    kill, saved = Kill(5), OnExceptionCheckpoint(tmp_path)
    trainer = quiet(max_epochs=1, accumulate_grad_batches=3, callbacks=[kill, saved], enable_checkpointing=True)
    cut = Slope(lr=0.1)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(cut, numbers(12))
    assert ended.value.code == 143
    assert trainer.received_sigterm
    assert (kill.batches, trainer.global_step, kill.raised) == (6, 2, ["KeyboardInterrupt"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    whole, resumed = Slope(lr=0.1), Slope(lr=0.1)
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(whole, numbers(12))
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(resumed, numbers(12), ckpt_path=saved.ckpt_path)
    assert resumed.w.item() == whole.w.item()
    assert cut.gradients + resumed.gradients == whole.gradients


def test_a_script_with_a_handler_of_its_own_ends_in_order_too(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        trainer = quiet(max_epochs=1, callbacks=[Kill(5)])
        with pytest.raises(SystemExit) as ended:
            trainer.fit(Slope(lr=0.1), numbers(12))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ended.value.code, trainer.received_sigterm, heard) == (143, True, [signal.SIGTERM])


def cut_on_two(at: int, rank: int) -> tuple[Any, int, bool]:
    kill = Kill(at, rank=rank)
    trainer = on_ranks(max_epochs=1, callbacks=[kill])
    try:
        trainer.fit(Slope(), numbers(40))
    except SystemExit as ended:
        return ended.code, trainer.global_step, trainer.received_sigterm
    return None, trainer.global_step, trainer.received_sigterm


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_hears_of_it_ends_all_at_the_same_step(ranks: RankPool, rank: int) -> None:
    first, second = ranks(2).run(cut_on_two, 3, rank, timeout=60)
    assert first == second
    assert first[0] == 143
    assert 3 <= first[1] <= 4


SCRIPT = """
import os, signal, sys
from lockstep import Callback
from lockstep.callbacks import ModelCheckpoint
from tests.loop.pieces import Slope, numbers, quiet

class Kill(Callback):
    def __init__(self): self.number, self.at = getattr(signal, sys.argv[1]), sys.argv[2]
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.at == str(trainer.global_step): self.strike()
    def on_train_end(self, trainer, module):
        if self.at == "end": self.strike()
    def on_exception(self, trainer, module, exception):
        if self.at == "failure": self.strike(); print("lives on")
    def strike(self): self.at = ""; os.kill(os.getpid(), self.number)

class Module(Slope):
    def training_step(self, batch, batch_idx):
        if sys.argv[2] == "failure": raise ValueError("no such label")
        return super().training_step(batch, batch_idx)

module = Module(lr=0.1)
trainer = quiet(max_epochs=2, callbacks=[Kill()], default_root_dir=os.getcwd())
trainer.fit(module, numbers(6))
print("fitted", trainer.global_step, module.w.item())
"""
TASK = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train.sh", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}
TASK |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
TASK |= dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), "1")


def run(
    ranks: RankPool, folder: Path, name: str, at: str, scontrol: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "scontrol").write_text(f"#!/bin/sh\n{scontrol}\n")
    (folder / "scontrol").chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", **environ}
    (done,) = run_script(ranks, folder / "train.py", name, at, folder=folder, environ=environ)
    return done


def test_sigterm_after_a_failure_ends_the_process_at_once(ranks: RankPool, tmp_path: Path) -> None:
    """torchrun and SLURM send it since another rank has failed: there is nothing to wait for."""
    done = run(ranks, tmp_path, "SIGTERM", "failure")
    assert (done.returncode, "lives on" in done.stdout) == (143, False)


def test_sigterm_behind_the_last_boundary_is_not_lost(ranks: RankPool, tmp_path: Path) -> None:
    done = run(ranks, tmp_path, "SIGTERM", "end")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_a_job_saves_requeues_itself_and_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    """`scontrol requeue` does not come back before SIGTERM does; the second life ends with the same bits."""
    undisturbed = run(ranks, tmp_path, "SIGUSR1", "never")
    assert undisturbed.stdout.startswith("fitted 12 "), undisturbed.stderr
    asked = f'echo "$@" >> {tmp_path}/asked; kill -TERM $PPID; sleep 1'
    first = run(ranks, tmp_path, "SIGUSR1", "8", asked, **TASK)
    assert (first.returncode, first.stdout) == (-signal.SIGTERM, ""), first.stderr
    assert "SIGUSR1: all ranks save to " in first.stderr
    second = run(ranks, tmp_path, "SIGUSR1", "8", asked, **TASK, SLURM_RESTART_COUNT="1")
    assert second.returncode == 0, second.stderr
    assert second.stdout == undisturbed.stdout
    assert "SLURM job 7, attempt 2: the fit continues from " in second.stderr
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert list(tmp_path.glob("*.ckpt")) == []


@pytest.mark.slow
def test_an_evaluation_in_a_job_is_not_ended_by_its_signals(tmp_path: Path) -> None:
    """USR1 comes 90 seconds before a job's time is over, and may find the script in its test."""
    (tmp_path / "test.py").write_text("""
import os, signal
from tests.loop.pieces import Slope, numbers, quiet
class Module(Slope):
    def test_step(self, batch, batch_idx): os.kill(os.getpid(), signal.SIGUSR1)
quiet(default_root_dir=os.getcwd()).test(Module(), numbers(3))
print("tested")
""")
    done = python("test.py", folder=tmp_path, **TASK, PYTHONPATH=PYTHONPATH)
    assert done.stdout.endswith("tested\n"), done.stderr
