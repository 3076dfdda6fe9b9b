"""A SLURM job's file: attempts, checkpoints, and what ranks of an earlier attempt may no longer do."""

from __future__ import annotations

import atexit
import json
import signal
import sys
from pathlib import Path

import pytest

from lockstep.launch.attempts import Job, Superseded, job_here
from tests.cluster.variables import variables, without

TASK = variables("SLURM_JOB_ID=7 SLURM_JOB_NAME=train.sh SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0")


def job(folder: Path, attempt: int = 0, **more: str) -> Job:
    restarts = {"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}
    return Job(str(folder), True, (signal.SIGUSR1,), {**TASK, **restarts, **more})


def end(job: Job, call: int = 1) -> None:
    """What the end of the process does."""
    atexit.unregister(job._forget)
    job._forget(call)


def test_the_first_attempt_leaves_no_file(tmp_path: Path) -> None:
    first = job(tmp_path)
    first.enter()
    assert first.newest(1) is None
    first.saved(str(tmp_path / "a.ckpt"), 1)
    assert first.newest(1) is None  # only an earlier attempt's counts
    first.done(1)
    assert Path(first.path).exists()  # the script goes on, and the job may be started anew
    end(first)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_is_submitted_anew_goes_on_as_another_job(tmp_path: Path) -> None:
    """Its file lies in the trial's folder, whatever `default_root_dir` is; its starts are counted over all jobs."""
    trial = tmp_path / "trial_0000"
    trial.mkdir()
    first = job(tmp_path, LOCKSTEP_TRIAL=str(trial))
    (tmp_path / "a.ckpt").touch()
    first.enter()
    first.saved(str(tmp_path / "a.ckpt"), 1)
    again = job(tmp_path, SLURM_JOB_ID="9", LOCKSTEP_TRIAL=str(trial), LOCKSTEP_TRIAL_STARTS="1")
    again.enter()
    assert again.newest(1) == str(tmp_path / "a.ckpt")
    assert again.checkpoint(1) == str(trial / "lockstep-trial-fit-1.ckpt")
    with pytest.raises(Superseded, match=r"the trial in .*trial_0000 has been restarted \(starts before this one=1"):
        first.check()
    requeued = job(tmp_path, 2, SLURM_JOB_ID="9", LOCKSTEP_TRIAL=str(trial), LOCKSTEP_TRIAL_STARTS="1")
    assert requeued.attempt == 3


def test_the_second_attempt_goes_on_from_what_the_first_saved_last(tmp_path: Path) -> None:
    first, second = job(tmp_path), job(tmp_path, 1)
    for name in ("a.ckpt", "b.ckpt", "other.ckpt"):
        (tmp_path / name).touch()
    first.saved(str(tmp_path / "a.ckpt"), 1)
    first.saved(str(tmp_path / "b.ckpt"), 1)
    first.saved(str(tmp_path / "other.ckpt"), 2)  # of the script's second fit
    second.enter()
    assert second.newest(1) == str(tmp_path / "b.ckpt")
    assert second.newest(2) == str(tmp_path / "other.ckpt")
    assert second.newest(3) is None
    (tmp_path / "b.ckpt").unlink()
    assert second.newest(1) is None


def test_an_earlier_attempt_is_refused(tmp_path: Path) -> None:
    """Its ranks may live on, on a node that was cut off."""
    first, second = job(tmp_path), job(tmp_path, 1)
    first.enter()
    first.check()
    second.enter()
    second.done(1)
    end(second)  # and it stays so when the second has come to its end
    for touch in (first.check, first.enter, lambda: first.saved("a", 1)):
        with pytest.raises(
            Superseded, match=r"SLURM job 7 has been restarted \(SLURM_RESTART_COUNT=1, but 0 in this process"
        ):
            touch()
    second.check()


def test_the_end_removes_the_fits_own_checkpoint(tmp_path: Path) -> None:
    first = job(tmp_path)
    own = Path(first.checkpoint(1))
    own.touch()
    first.saved(str(own), 1)
    first.saved("later.ckpt", 2)
    first.done(1)
    end(first)
    assert not own.exists()
    assert json.loads(Path(first.path).read_text())["saved"] == {"2": "later.ckpt"}


def fake(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "scontrol").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_scontrol_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, f'echo "$@" >> {tmp_path}/asked', monkeypatch)
    assert job(tmp_path).requeue() == ""
    assert job(tmp_path, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2").requeue() == ""
    assert (tmp_path / "asked").read_text() == "requeue 7\nrequeue 5_2\n"


def test_tasks_of_srun_have_a_job_and_a_batch_script_of_one_task(tmp_path: Path) -> None:
    """Without srun SIGUSR1 killed the run, and nothing was saved or requeued."""
    batch = without(TASK, "SLURM_STEP_ID")
    for environ in (TASK, batch):
        found = job_here(str(tmp_path), None, environ)
        assert found is not None
        assert found.asks == (signal.SIGUSR1, signal.SIGUSR2)
    for none in ({**batch, "SLURM_NTASKS": "2"}, {**batch, "SLURM_JOB_NAME": "interactive"}, {}):
        assert job_here(str(tmp_path), None, none) is None
    typed = without(batch, "SLURM_PROCID")  # in a shell of salloc
    assert job_here(str(tmp_path), None, typed) is None


def test_a_script_that_fails_behind_its_fit_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = job(tmp_path)
    first.saved("a.ckpt", 1)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    first._forget(1)
    assert first.check()["saved"] == {"1": "a.ckpt"}
