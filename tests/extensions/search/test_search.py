"""How trials stand: by their own words and by what SLURM knows, with slurmdbd and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.extensions.search import queue
from lockstep.extensions.search.queue import QueuedJob, SlurmRefused
from lockstep.extensions.search.search import Limits, Search, exhausted, found_at, query_trials, ranges, state_of
from lockstep.extensions.search.trials import STDERR, TrialFolder, read_events
from tests.extensions.search.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def told(*events: str) -> list[dict[str, Any]]:
    """Events a second apart: "submitted 5", "started 5/0", "failed 0", "completed 0" ..."""
    found: list[dict[str, Any]] = []
    for moment, words in enumerate(events):
        kind, _, rest = words.partition(" ")
        event: dict[str, Any] = {"event": kind, "time": float(moment), "host": "node1"}
        if kind == "submitted":
            event["job"] = rest
        elif kind == "started":
            event["job"], event["attempt"] = rest.split("/")[0], int(rest.split("/")[1])
        elif rest:
            event["attempt"], event["error"] = int(rest), "ValueError: no"
        found.append(event)
    return found


SUBMITTED, STARTED = ("submitted 5",), ("submitted 5", "started 5/0")


@pytest.mark.parametrize(
    ("events", "slurm", "state"),
    [
        ((), None, "unsubmitted"),
        (SUBMITTED, "PENDING", "pending"),
        (SUBMITTED, "RUNNING", "running"),  # Python begins
        (SUBMITTED, "CANCELLED", "cancelled"),
        (SUBMITTED, "FAILED", "failed"),
        (SUBMITTED, None, "failed"),  # forgotten by SLURM
        (STARTED, "RUNNING", "running"),
        (STARTED, "COMPLETING", "running"),
        (STARTED, "PENDING", "pending"),  # requeued
        (STARTED, "PREEMPTED", "preempted"),
        (STARTED, "NODE_FAIL", "preempted"),
        (STARTED, "TIMEOUT", "failed"),
        (STARTED, "OUT_OF_MEMORY", "failed"),
        (STARTED, "COMPLETED", "failed"),  # without a last word
        ((*STARTED, "completed 0"), "RUNNING", "completed"),
        ((*STARTED, "completed 0"), "COMPLETED", "completed"),
        ((*STARTED, "completed 0"), None, "completed"),
        ((*STARTED, "pruned 0", "completed 0"), "COMPLETED", "pruned"),
        ((*STARTED, "failed 0"), "FAILED", "failed"),
        ((*STARTED, "failed 0"), "RUNNING", "failed"),  # the other ranks end
        ((*STARTED, "failed 0"), "PENDING", "pending"),  # a node was lost, and the job requeued
        ((*STARTED, "failed 0"), "NODE_FAIL", "preempted"),  # the same under --no-requeue
        ((*STARTED, "failed 0", "submitted 6"), "PENDING", "pending"),
        ((*STARTED, "failed 0", "submitted 6"), "RUNNING", "running"),
        ((*STARTED, "failed 0", "submitted 6", "started 6/1", "completed 1"), "COMPLETED", "completed"),
        ((*STARTED, "cancelled"), None, "cancelled"),
        ((*STARTED, "cancelled", "submitted 6"), "PENDING", "pending"),
        (("started None/0",), None, "running"),  # on this machine
    ],
)
def test_the_state_of_a_trial(events: tuple[str, ...], slurm: str | None, state: str) -> None:
    found = told(*events)
    for event in found:
        event["job"] = None if event.get("job") == "None" else event.get("job")
    assert state_of(read_events(found), None if slurm is None else QueuedJob(slurm))[0] == state


def test_a_state_is_unknown_where_slurm_cannot_be_asked(tmp_path: Path, slurm: FakeSlurm) -> None:
    TrialFolder.of(tmp_path, 0).note("submitted", job="5")
    slurm.refuses("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    statuses, trouble = query_trials(Search(tmp_path))
    assert statuses[0].state == "unknown"
    assert trouble == "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_job_that_failed_before_python_tells_its_last_line(tmp_path: Path, slurm: FakeSlurm) -> None:
    trial = TrialFolder.of(tmp_path, 0)
    trial.note("submitted", job="5")
    slurm.says("squeue", "5|FAILED|node3|NonZeroExitCode\n")
    assert "check that node3 sees" in query_trials(Search(tmp_path))[0][0].error
    (trial.path / STDERR).write_text("bash: module: command not found\nlockstep: the module x could not be loaded\n")
    assert query_trials(Search(tmp_path))[0][0].error == "lockstep: the module x could not be loaded"


def test_restarts_are_limited_apart_for_preemptions_and_failures(tmp_path: Path, slurm: FakeSlurm) -> None:
    events = ("submitted 5", "started 5/0", "started 5/1", "failed 1", "submitted 6", "started 6/2", "failed 2")
    trial = TrialFolder.of(tmp_path, 0)
    for each in told(*events):
        trial.note(**{name: value for name, value in each.items() if name not in ("time", "host")})
    slurm.says("squeue", "6|FAILED||\n")
    status = query_trials(Search(tmp_path))[0][0]
    assert (status.state, status.history.preemptions, status.history.failures) == ("failed", 1, 2)
    assert exhausted(status, Limits(preemptions=1, failures=3)) == ""
    assert exhausted(status, Limits(failures=2)) == "trial 0 failed 2 time(s), max_failures is 2"
    assert exhausted(status, Limits(preemptions=0)) == "trial 0 was preempted 1 time(s), max_preemptions is 0"


def test_searches_below_a_log_path(tmp_path: Path) -> None:
    for name in ("b/trial_0000", "a/trial_0000", "none"):
        (tmp_path / name).mkdir(parents=True)
    assert [search.path.name for search in found_at(tmp_path)] == ["a", "b"]
    assert [search.path.name for search in found_at(tmp_path / "a")] == ["a"]
    assert found_at(tmp_path / "none") == found_at(tmp_path / "nowhere") == []


def test_numbers_in_few_words() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([8, 0, 1, 2, 7]) == "0-2, 7-8"


# -- what SLURM knows ----------------------------------------------------------------------------------------


def test_jobs_in_the_queue(slurm: FakeSlurm) -> None:
    slurm.says("squeue", "120_7|PENDING||JobArrayTaskLimit\n120_8|RUNNING|node2|None\n119|COMPLETED|node1|None\n")
    assert queue.query_jobs(["120_7", "120_8"]) == {
        "120_7": QueuedJob("PENDING", "", "JobArrayTaskLimit"),
        "120_8": QueuedJob("RUNNING", "node2", ""),
    }
    assert "--jobs=120" in slurm.calls("squeue")[0]
    assert slurm.calls("sacct") == []


def test_jobs_that_the_controller_has_forgotten_are_looked_up_in_slurmdbd(slurm: FakeSlurm) -> None:
    slurm.refuses("squeue", "slurm_load_jobs error: Invalid job id specified")
    slurm.says("sacct", "5|CANCELLED by 0|node1\n7_1|COMPLETED|node2\n7_[2-3]|PENDING|None assigned\n")
    assert queue.query_jobs(["5", "7_1", "8"]) == {
        "5": QueuedJob("CANCELLED", "node1"),
        "7_1": QueuedJob("COMPLETED", "node2"),
    }
    slurm.refuses("sacct", "Slurm accounting storage is disabled")
    assert queue.query_jobs(["5"]) == {}


def test_commands_that_are_missing_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm) -> None:
    (slurm.folder / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(queue, "SECONDS", 0.2)
    with pytest.raises(SlurmRefused, match=r"squeue did not finish within 0\.2 seconds"):
        queue.query_jobs(["5"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmRefused, match=r"squeue is not on PATH\. Use a machine with SLURM"):
        queue.query_jobs(["5"])
    assert not queue.is_available()


def test_the_number_of_a_job_of_another_cluster(slurm: FakeSlurm) -> None:
    (slurm.folder / "bin" / "sbatch").write_text("#!/bin/sh\necho '77;west'\n")
    assert queue.submit("x.sh") == "77"
