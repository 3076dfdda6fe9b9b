"""A trial's folder: values that come back exactly, events, metrics, and what the events say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.extensions.search import trials
from lockstep.extensions.search.trials import TrialFolder, encoded, folders, read_events
from lockstep.ground.errors import MisconfigurationException

VALUES = st.dictionaries(st.text(min_size=1), st.none() | st.booleans() | st.integers() | st.floats() | st.text())


@given(VALUES)
def test_values_come_back_exactly(values: dict[str, object]) -> None:
    """Also newlines, NUL, lone surrogates, infinities and numbers of any size."""
    assert repr(json.loads(encoded(values))) == repr(values)


def test_values_are_read_from_the_folder(tmp_path: Path) -> None:
    trial = TrialFolder.of(tmp_path / "a search", 12345)
    assert trial.values() is None
    trial.write_values({"text": "a\n'b'\0;$(touch x)", "lr": 1e-3})
    again = TrialFolder(tmp_path / "a search" / "trial_12345")
    assert again.values() == {"text": "a\n'b'\0;$(touch x)", "lr": 1e-3}
    assert again.number == 12345


def test_a_value_that_json_cannot_hold_is_named() -> None:
    with pytest.raises(MisconfigurationException, match=r"model=<object .* Use numbers, text"):
        encoded({"lr": 1, "model": object()})


def test_a_folder_of_another_name_is_no_trial(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*trial_7' is not a trial's folder"):
        TrialFolder(tmp_path / "trial_7")


def test_folders_are_ordered_by_number(tmp_path: Path) -> None:
    for name in ("trial_10000", "trial_0002", "trial_0010", "other", "trial_x"):
        (tmp_path / name).mkdir()
    assert [trial.number for trial in folders(tmp_path)] == [2, 10, 10000]
    assert folders(tmp_path / "none") == []


def test_an_event_after_a_line_that_a_crash_has_cut(tmp_path: Path) -> None:
    trial = TrialFolder.of(tmp_path, 0)
    trial.note("submitted", job="1")
    with open(trial.path / trials.EVENTS, "ab") as file:
        file.write(b'{"event": "star')
    trial.note("started", job="1", attempt=0)
    assert [told["event"] for told in trial.events()] == ["submitted", "started"]


def test_the_newest_metrics_keep_what_a_later_line_lacks(tmp_path: Path) -> None:
    trial = TrialFolder.of(tmp_path, 0)
    assert trial.result() == {}
    trial.log({"loss": 1.0, "val_loss": 2.0}, epoch=0, step=10)
    trial.log({"loss": 0.5}, epoch=1, step=20)
    assert trial.result()["metrics"] == {"loss": 0.5, "val_loss": 2.0}
    assert trial.result()["step"] == 20
    assert [line["metrics"] for line in trial.curves()] == [{"loss": 1.0, "val_loss": 2.0}, {"loss": 0.5}]


def test_the_last_line_is_of_stderr_first(tmp_path: Path) -> None:
    trial = TrialFolder.of(tmp_path, 0)
    assert trial.last_line() == ""
    trial.path.mkdir()
    (trial.path / trials.STDOUT).write_text("one\ntwo\n\n")
    assert trial.last_line() == "two"
    (trial.path / trials.STDERR).write_text("Traceback\nValueError: no\n")
    assert trial.last_line() == "ValueError: no"
    with open(trial.path / trials.STDERR, "a") as file:
        file.write("srun: error: node1: task 0: Exited with exit code 1\n")
    assert trial.last_line() == "ValueError: no"


# -- what the events say --------------------------------------------------------------------------------------


def started(attempt: int, moment: float, **more: object) -> dict[str, object]:
    return {"event": "started", "time": moment, "host": f"node{attempt}", "attempt": attempt, "job": "5", **more}


def test_a_start_without_a_last_word_and_another_one_is_a_preemption() -> None:
    history = read_events([started(0, 1.0), started(1, 10.0), {"event": "completed", "time": 15.0, "attempt": 1}])
    assert (history.restarts, history.preemptions, history.failures) == (1, 1, 0)
    assert history.last is not None
    assert (history.last.end, history.last.host) == ("completed", "node1")
    assert history.seconds == 5.0


def test_a_start_that_failed_and_was_submitted_anew_is_a_failure() -> None:
    first = [started(0, 1.0), {"event": "failed", "time": 2.0, "attempt": 0, "error": "E"}]
    again = started(1, 3.0, job="6")
    assert read_events(first).failures == 1
    history = read_events([*first, again])
    assert (history.restarts, history.preemptions, history.failures) == (1, 0, 1)


def test_a_failure_that_slurm_follows_by_another_start_is_a_preemption() -> None:
    """The ranks that are left raise when a node is lost, before SLURM has the job requeued."""
    failed = {"event": "failed", "time": 2.0, "attempt": 0, "error": "RankFailed: rank 1 is gone"}
    history = read_events([started(0, 1.0), failed, started(1, 3.0)])
    assert (history.restarts, history.preemptions, history.failures) == (1, 1, 0)


def test_of_the_ranks_failures_the_first_cause_counts() -> None:
    """A rank that only lost its peer may be the first to say so; and rank 0 may have come to its end."""
    events = [
        started(0, 1.0),
        {"event": "failed", "time": 2.0, "attempt": 0, "error": "RankFailed: rank 1 has failed"},
        {"event": "failed", "time": 3.0, "attempt": 0, "error": "ValueError: the cause"},
        {"event": "failed", "time": 4.0, "attempt": 0, "error": "ValueError: another"},
        {"event": "completed", "time": 5.0, "attempt": 0},
    ]
    last = read_events(events).last
    assert last is not None
    assert (last.end, last.error) == ("failed", "ValueError: the cause")


def test_words_of_an_earlier_start_that_come_late_belong_to_it() -> None:
    """A node that was cut off goes on and comes to its end, when the trial runs elsewhere."""
    history = read_events([started(0, 1.0), started(1, 5.0), {"event": "completed", "time": 6.0, "attempt": 0}])
    assert history.last is not None
    assert history.last.number == 1
    assert history.last.end is None


def test_a_trial_that_was_submitted_anew_waits() -> None:
    first = [{"event": "submitted", "time": 0.0, "job": "5"}, started(0, 1.0)]
    assert not read_events(first).is_waiting
    assert read_events([*first, {"event": "submitted", "time": 9.0, "job": "6"}]).is_waiting
