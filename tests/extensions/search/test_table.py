"""The table of trials, and the commands on it."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pytest

from lockstep.cli.run import main
from lockstep.extensions.search.search import Search, query_trials
from lockstep.extensions.search.table import order_by, text
from lockstep.extensions.search.trials import EVENTS, RESULT, STDERR, VALUES, TrialFolder
from tests.extensions.search.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def searched(folder: Path, count: int = 6, array: bool = False) -> Search:
    """A search: trial 0 failed, 1 was preempted, 2 waits, 3 was never submitted, the others are completed."""
    search = Search(folder / "digits")
    search.write({"array": array, "max_failures": 2})
    for number in range(count):
        trial = TrialFolder.of(search.path, number)
        trial.write_values({"lr": 10.0**-number, "name": "a\x1b[2Jb" if number % 2 else "b", "same": 1})
        if number == 3:
            continue
        job = f"10_{number}" if array else str(10 + number)
        trial.note("submitted", job=job)
        if number == 2:
            continue
        trial.note("started", job=job, attempt=0)
        trial.log({"val_loss": 1.0 + number}, epoch=0, step=10)
        if number == 0:
            trial.note("failed", attempt=0, error="ValueError: no")
        elif number > 3:
            trial.log({"val_loss": 0.1 * number, "val_accuracy": 0.1 * number}, epoch=1, step=20)
            trial.note("completed", attempt=0, value=0.1 * number)
    return search


QUEUE = "10|FAILED||\n11|PREEMPTED|node2|None\n12|PENDING||Priority\n14|COMPLETED||\n15|COMPLETED||\n"


def test_the_table(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    search = searched(tmp_path)
    slurm.says("squeue", QUEUE)
    assert main(["trials", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = "digits: 6 trial(s): 1 failed, 1 preempted, 1 pending, 1 unsubmitted, 2 completed"
    assert lines[0] == heading
    assert lines[1].split() == ["trial", "state", "lr", "name", "val_loss", "val_accuracy", "node", "restarts",
                                "seconds", "why"]  # fmt: skip
    assert lines[2].endswith("ValueError: no")
    assert r"a\x1b[2Jb" in lines[3]  # no text steers the terminal
    assert "\x1b" not in "".join(lines)
    assert lines[4].endswith("Priority")
    assert lines[-1] == "best: trial 4, val_loss 0.4 (the smallest)"
    assert main(["trials", str(search.path), "--sort", "val_accuracy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:8]] == ["5", "4", "0", "1", "2", "3"]
    assert lines[-1] == "best: trial 5, val_accuracy 0.5 (the largest)"
    assert main(["trials", str(search.path), "--sort", "val_accuracy", "--min"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "best: trial 4, val_accuracy 0.4 (the smallest)"


def test_csv_and_json(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    search = searched(tmp_path)
    slurm.says("squeue", QUEUE)
    TrialFolder.of(search.path, 5).log({"val_loss": float("nan")})
    assert main(["trials", str(search.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows][:2] == ["failed", "preempted"]
    assert rows[1]["values"] == {"lr": 0.1, "name": "a\x1b[2Jb", "same": 1}
    assert rows[5]["metrics"]["val_loss"] == "nan"
    assert main(["trials", str(search.path), "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["values.lr"] for row in table][:2] == ["1.0", "0.1"]
    assert table[4]["metrics.val_loss"] == "0.4"


def test_a_thousand_trials_are_shown_in_less_than_a_second(tmp_path: Path, slurm: FakeSlurm) -> None:
    search = Search(tmp_path / "digits")
    search.write({"array": True})
    for number in range(1000):  # without waiting for the disk, as thousand trials do side by side
        trial = TrialFolder.of(search.path, number)
        trial.note("submitted", job=f"10_{number}")
        trial.note("started", job=f"10_{number}", attempt=0)
        trial.note("completed", attempt=0)
        (trial.path / VALUES).write_text(f'{{"lr": {number}, "layers": {number % 7}}}')
        (trial.path / RESULT).write_text(f'{{"metrics": {{"val_loss": {number}.5, "val_accuracy": 0.5}}}}')
    for trial in search.trials()[::2]:  # SLURM is asked for those without a last word
        (trial.path / EVENTS).write_bytes(b"".join((trial.path / EVENTS).read_bytes().splitlines(True)[:2]))
    slurm.says("squeue", "".join(f"10_{number}|RUNNING|node1|None\n" for number in range(1000)))
    began = time.process_time()
    statuses, _ = query_trials(search)
    shown = text("digits", statuses, order_by(statuses, None, None))
    assert time.process_time() - began < 1
    assert len(slurm.calls("squeue")) == 1
    assert shown.count("\n") == 1002


# -- anew, and away ------------------------------------------------------------------------------------------


def test_trials_that_failed_are_submitted_anew(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above all starts that a trial has had; and not for ever."""
    search = searched(tmp_path)
    slurm.says("squeue", QUEUE)
    assert main(["trials", str(search.path), "--resubmit", "failed"]) == 0
    assert slurm.calls("sbatch") == [["--parsable", f"{search.path}/trial_0000/job.sh", "1"]]
    trial = TrialFolder.of(search.path, 0)
    trial.note("started", job="101", attempt=1)
    trial.note("failed", attempt=1, error="ValueError: again")
    assert main(["trials", str(search.path), "--resubmit", "failed"]) == 0
    assert "trial 0 failed 2 time(s), max_failures is 2" in capsys.readouterr().err
    assert len(slurm.calls("sbatch")) == 1
    assert main(["trials", str(search.path), "--resubmit", "failed", "--max-failures", "3"]) == 0
    assert slurm.calls("sbatch")[1][-1] == "2"
    assert main(["trials", str(search.path), "--resubmit", "1,3"]) == 0
    assert [call[1:] for call in slurm.calls("sbatch")[2:]] == [
        [f"{search.path}/trial_0001/job.sh", "1"],
        [f"{search.path}/trial_0003/job.sh", "0"],
    ]


def test_trials_of_an_array_are_submitted_anew_as_one(tmp_path: Path, slurm: FakeSlurm) -> None:
    search = searched(tmp_path, array=True)
    slurm.says("squeue", "10_0|FAILED||\n10_1|PREEMPTED||\n10_2|PENDING||\n")
    assert main(["trials", str(search.path), "--resubmit", "0,1,3"]) == 0
    assert slurm.calls("sbatch") == [["--parsable", "--array=0-1,3", f"{search.path}/job.sh", "1"]]
    assert TrialFolder.of(search.path, 3).events()[-1]["job"] == "101_3"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resubmit", "4"], "trial 4 is completed. Only failed, preempted"),
        (["--resubmit", "2"], "trial 2 is pending"),
        (["--resubmit", "9"], "there is no trial '9'; the search has 6 trial(s). Use failed, preempted"),
        (["--resubmit", "faled"], "there is no trial 'faled'"),
        (["--cancel", "x"], "there is no trial 'x'"),
        (["--sort", "loss"], "--sort loss: no trial has logged this metric. Logged metrics: val_loss, val_accuracy"),
    ],
)
def test_what_cannot_be_done(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    search = searched(tmp_path)
    slurm.says("squeue", QUEUE)
    assert main(["trials", str(search.path), *words]) == 2
    assert said in capsys.readouterr().err
    assert slurm.calls("sbatch") == slurm.calls("scancel") == []


def test_nothing_is_submitted_anew_while_slurm_cannot_be_asked(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial may still run."""
    search = searched(tmp_path)
    slurm.refuses("squeue", "Unable to contact slurm controller")
    assert main(["trials", str(search.path), "--resubmit", "failed"]) == 1
    assert "SLURM did not report the states" in capsys.readouterr().err
    assert slurm.calls("sbatch") == []


def test_cancelling(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    search = searched(tmp_path)
    slurm.says("squeue", QUEUE)
    assert main(["trials", str(search.path), "--cancel"]) == 0
    assert slurm.calls("scancel") == [["12"]]
    assert "cancelled: trial(s) 2" in capsys.readouterr().err
    slurm.says("squeue", QUEUE.replace("12|PENDING", "12|CANCELLED"))
    assert query_trials(search)[0][2].state == "cancelled"


def test_watching_until_all_is_over(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """What is preempted is submitted anew, meanwhile."""
    search = searched(tmp_path)
    slurm.says("squeue", QUEUE.replace("12|PENDING", "12|COMPLETED"))
    trial = TrialFolder.of(search.path, 1)
    (slurm.folder / "bin" / "sbatch").write_text(
        f"#!/bin/sh\ncd {trial.path}\n"
        'echo \'{"event": "submitted", "time": 9e9, "job": "500"}\' >> events.jsonl\n'
        'echo \'{"event": "started", "time": 99e8, "attempt": 1, "job": "500"}\' >> events.jsonl\n'
        'echo \'{"event": "completed", "time": 99e8, "attempt": 1}\' >> events.jsonl\necho 500\n'
    )
    assert main(["trials", str(search.path), "--watch", "0.1", "--resubmit", "preempted"]) == 0
    out, err = capsys.readouterr()
    assert err.count("submitted trial(s) 1 as job 500") == 1
    assert "3 completed" in out.split("digits: 6 trial(s)")[-1]


def test_several_searches_at_a_path(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    searched(tmp_path)
    TrialFolder.of(tmp_path / "other", 0).write_values({"lr": 1})
    slurm.says("squeue", QUEUE)
    assert main(["trials", str(tmp_path)]) == 0
    assert "other: 1 trial(s): 1 unsubmitted" in capsys.readouterr().out
    assert main(["trials", str(tmp_path), "--cancel"]) == 2
    assert "contains several searches. Use one of them" in capsys.readouterr().err
    assert main(["trials", str(tmp_path / "nothing")]) == 2
    assert "there are no trials (folders trial_0000 ...)" in capsys.readouterr().err


def test_a_failed_start_tells_its_last_line(tmp_path: Path, slurm: FakeSlurm) -> None:
    trial = TrialFolder.of(tmp_path / "x", 0)
    trial.note("submitted", job="5")
    (trial.path / STDERR).write_text("srun: error: Unable to create step\n")
    slurm.says("squeue", "5|FAILED||NonZeroExitCode\n")
    statuses, _ = query_trials(Search(tmp_path / "x"))
    assert "srun: error: Unable to create step" in text("x", statuses, None)
