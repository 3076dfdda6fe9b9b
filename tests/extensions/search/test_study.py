"""One study over a journal file: trials by number, torn lines, dead workers."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from lockstep.extensions.search import journal, parser, study  # noqa: E402
from lockstep.extensions.search.grid import Options, SearchSettings, Space, make_range  # noqa: E402
from lockstep.extensions.search.journal import CorruptJournal, StudyJournal  # noqa: E402
from lockstep.extensions.search.lock import FileLock, holding  # noqa: E402
from lockstep.extensions.search.parser import Hyperparameters  # noqa: E402
from lockstep.extensions.search.study import BEAT, LOST, NUMBER, StudyTrial, fail_dead  # noqa: E402
from lockstep.extensions.search.trials import JOURNAL, TrialFolder  # noqa: E402
from lockstep.extensions.search.trials_command import trials  # noqa: E402
from lockstep.ground.errors import MisconfigurationException  # noqa: E402
from lockstep.ground.rank import rank_zero_only  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.WARNING)

SPACE = Space({"lr": make_range("--lr", 1e-4, 1e-1, log_base=10, type=float), "layers": Options((16, 32, 64))})


def settings(**given: Any) -> SearchSettings:
    return SearchSettings("optuna", **{"space": SPACE, **given})


def opened(folder: Path) -> Any:
    """The study as Optuna's own tools open it."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
    return optuna.load_study(study_name=folder.name, storage=optuna.storages.JournalStorage(backend))


def played(folder: Path, number: int, values: list[float], **given: Any) -> str:
    """A trial that reports these values; gives how it ended."""
    trial = StudyTrial(settings(**given), number, folder)
    trial.draw()
    for step, value in enumerate(values):
        if trial.report(step, value):
            break
    return trial.finish(number, "completed", None)


# -- trials by number -----------------------------------------------------------------------------------------


def test_a_number_asked_again_has_the_same_values(tmp_path: Path) -> None:
    first = StudyTrial(settings(), 7, tmp_path)
    values = first.draw()
    first.stop_heartbeat()
    again = StudyTrial(settings(), 7, tmp_path)  # of a job that was requeued
    assert again.draw() == values
    assert again.finish(7, "completed", 1.0) == "completed"
    assert again.draw() == values
    assert again.finish(7, "completed", 2.0) == "completed"  # it has ended already
    (entry,) = opened(tmp_path).trials
    assert (entry.user_attrs[NUMBER], entry.value, entry.params) == (7, 1.0, values)


def test_a_trial_that_died_while_it_drew_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suggest, calls = study._suggest, []

    def dying(trial: Any, name: str, dimension: Any) -> Any:
        calls.append(name)
        if name == "layers":
            raise KeyboardInterrupt
        return suggest(trial, name, dimension)

    monkeypatch.setattr(study, "_suggest", dying)
    with pytest.raises(KeyboardInterrupt):
        StudyTrial(settings(), 0, tmp_path).draw()
    (half,) = opened(tmp_path).trials
    monkeypatch.undo()
    trial = StudyTrial(settings(), 0, tmp_path)
    assert trial.draw()["lr"] == half.params["lr"]
    trial.finish(0, "completed", 1.0)
    assert [entry.state.name for entry in opened(tmp_path).trials] == ["COMPLETE"]


def test_trials_draw_different_values_and_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    drawn = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trials = [StudyTrial(settings(seed=seed), number, tmp_path / name) for number in range(4)]
        drawn.append([trial.draw()["lr"] for trial in trials])
        for trial in trials:
            trial.stop_heartbeat()
    assert len(set(drawn[0])) == 4
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_values_that_somebody_enqueued_come_first(tmp_path: Path) -> None:
    played(tmp_path, 0, [1.0])
    opened(tmp_path).enqueue_trial({"lr": 0.05, "layers": 64})
    trial = StudyTrial(settings(), 1, tmp_path)
    assert trial.draw() == {"lr": 0.05, "layers": 64}
    trial.finish(1, "completed", 1.0)
    assert len(opened(tmp_path).trials) == 2


def test_a_failed_trial_that_is_started_again_keeps_number_and_values(tmp_path: Path) -> None:
    trial = StudyTrial(settings(), 3, tmp_path)
    values = trial.draw()
    trial.report(0, 5.0)
    assert trial.finish(3, "failed", None) == "failed"
    again = StudyTrial(settings(), 3, tmp_path)
    assert again.draw() == values
    assert again.finish(3, "completed", 4.0) == "completed"
    assert [(entry.state.name, entry.user_attrs[NUMBER]) for entry in opened(tmp_path).trials] == [
        ("FAIL", 3), ("COMPLETE", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_trial_without_a_value_counts_as_failed_and_says_so(
    value: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial = StudyTrial(settings(), 0, tmp_path)
    trial.draw()
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert trial.finish(0, "completed", value) == "failed"
    assert "Return a number from the function" in caplog.text


def test_the_last_report_is_the_value_and_the_pruner_stops_a_bad_trial(tmp_path: Path) -> None:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    assert [played(tmp_path, number, [2.0, 1.0], pruner=pruner) for number in range(2)] == ["completed"] * 2
    assert played(tmp_path, 2, [9.0, 9.0], pruner=pruner) == "pruned"
    assert [(entry.state.name, entry.value) for entry in opened(tmp_path).trials] == [
        ("COMPLETE", 1.0), ("COMPLETE", 1.0), ("PRUNED", 9.0),
    ]  # fmt: skip
    assert opened(tmp_path).best_value == 1.0


@pytest.mark.parametrize("told", ["failed", None])
def test_a_start_that_begins_anew_kept_the_reports_of_the_one_before(told: Any, tmp_path: Path) -> None:
    trial = StudyTrial(settings(), 0, tmp_path)
    trial.draw()
    for step in range(3):
        trial.report(step, 100.0)
    if told:
        trial.finish(0, told, None)
    trial.stop_heartbeat()  # or its process was killed
    again = StudyTrial(settings(), 0, tmp_path)
    again.draw()
    again.resume(0)
    again.report(0, 1.0)
    assert again.finish(0, "completed", None) == "completed"
    old, new = opened(tmp_path).trials
    assert (old.state.name, new.value, new.intermediate_values) == ("FAIL", 1.0, {0: 1.0})


def test_a_start_that_resumes_takes_over_the_reports_before_its_checkpoint(tmp_path: Path) -> None:
    trial = StudyTrial(settings(), 0, tmp_path)
    trial.draw()
    for step in range(4):
        trial.report(step, float(step))
    trial.stop_heartbeat()
    again = StudyTrial(settings(), 0, tmp_path)
    again.draw()
    again.resume(2)
    again.report(2, 9.0)
    assert again.finish(0, "completed", None) == "completed"
    assert opened(tmp_path).trials[-1].intermediate_values == {0: 0.0, 1: 1.0, 2: 9.0}


def test_a_start_that_reports_nothing_had_the_value_of_the_one_before(tmp_path: Path) -> None:
    pruner = optuna.pruners.ThresholdPruner(upper=50)
    trial = StudyTrial(settings(pruner=pruner), 0, tmp_path)
    trial.draw()
    assert trial.report(0, 100.0)
    trial.finish(0, "failed", None)
    again = StudyTrial(settings(), 0, tmp_path)
    again.draw()
    assert again.finish(0, "completed", None) == "failed"
    again = StudyTrial(settings(), 0, tmp_path)
    again.draw()
    again.resume(1)  # behind its last report: it was pruned there
    assert again.finish(0, "completed", None) == "pruned"


def test_a_trial_that_has_ended_takes_no_more_reports(tmp_path: Path) -> None:
    played(tmp_path, 0, [1.0])
    again = StudyTrial(settings(), 0, tmp_path)
    again.draw()
    again.resume(0)
    assert [again.report(step, 5.0) for step in range(2)] == [False, False]
    again.finish(0, "completed", None)
    (entry,) = opened(tmp_path).trials
    assert entry.intermediate_values == {0: 1.0}


def test_a_report_made_twice_stays_as_it_was(tmp_path: Path) -> None:
    trial = StudyTrial(settings(), 0, tmp_path)
    trial.draw()
    trial.report(0, 1.0)
    trial.report(0, 2.0)
    trial.finish(0, "completed", None)
    assert opened(tmp_path).trials[0].intermediate_values == {0: 1.0}


def test_options_that_optuna_cannot_hold_are_drawn_all_the_same(tmp_path: Path) -> None:
    space = Space({"sizes": Options(([1, 2], [3])), "same": Options((1, True, 1.0))})
    trial = StudyTrial(settings(space=space), 0, tmp_path)
    values = trial.draw()
    trial.finish(0, "completed", 1.0)
    assert values["sizes"] in ([1, 2], [3])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "max"}, "mode='max', but the study .* is set to minimize"),
        ({"space": Space({"layers": Options((1, 2)), "lr": SPACE.dimensions["lr"]})}, "has other options"),
        ({"sampler": lambda seed: optuna.samplers.GridSampler({"layers": [16]})}, "Use strategy='grid_search'"),
    ],
)
def test_a_study_of_another_search_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    played(tmp_path, 0, [1.0])
    with pytest.raises(MisconfigurationException, match=said):
        StudyTrial(settings(**given), 1, tmp_path).draw()


def test_other_ranks_wait_for_what_rank_0_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    waiting = StudyTrial(settings(), 5, tmp_path)
    thread = threading.Thread(target=lambda: found.append(waiting.wait()))
    thread.start()
    played(tmp_path, 4, [1.0])
    trial = StudyTrial(settings(), 5, tmp_path)
    values = trial.draw()
    thread.join()
    trial.stop_heartbeat()
    assert found == [values]
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(parser, "_running", None)
    options = Hyperparameters.of({}, settings())
    assert vars(options.draw(5, tmp_path)) == values
    monkeypatch.setattr(study, "PATIENCE", 0.2)
    with pytest.raises(TimeoutError, match="rank 0 has drawn no values"):
        options.draw(6, tmp_path)


# -- heartbeats -----------------------------------------------------------------------------------------------


def silenced(folder: Path, number: int) -> StudyTrial:
    """A trial whose node has died some time ago."""
    trial = StudyTrial(settings(), number, folder)
    trial.draw()
    trial.report(0, 3.0)
    trial.stop_heartbeat()
    beat = TrialFolder.of(folder, number).path / BEAT
    os.utime(beat, (time.time() - 1000, time.time() - 1000))
    return trial


def test_a_trial_whose_node_died_is_failed_by_the_next_one(tmp_path: Path) -> None:
    silenced(tmp_path, 0)
    assert played(tmp_path, 1, [1.0]) == "completed"
    dead, lives = opened(tmp_path).trials
    assert (dead.state.name, lives.state.name) == ("FAIL", "COMPLETE")
    assert "no heartbeat for 1" in dead.user_attrs[LOST]


def test_one_that_nobody_comes_after_is_failed_by_who_looks(tmp_path: Path) -> None:
    assert fail_dead(tmp_path) == []  # no study yet
    silenced(tmp_path, 4)
    assert fail_dead(tmp_path) == [4]
    assert fail_dead(tmp_path) == []


def test_the_table_of_trials_left_one_running_whose_node_had_died(tmp_path: Path) -> None:
    silenced(tmp_path, 4)
    assert trials([str(tmp_path)]) == 0
    (dead,) = opened(tmp_path).trials
    assert dead.state.name == "FAIL"


def test_a_trial_that_was_taken_for_dead_and_is_not_is_not_lost(tmp_path: Path) -> None:
    trial = silenced(tmp_path, 0)
    fail_dead(tmp_path)
    trial.report(1, 2.0)
    fail_dead(tmp_path)
    assert trial.finish(0, "completed", None) == "completed"
    entries = opened(tmp_path).trials
    assert [entry.state.name for entry in entries] == ["FAIL", "FAIL", "COMPLETE"]
    assert (entries[2].value, entries[2].intermediate_values) == (2.0, {0: 3.0, 1: 2.0})
    assert {entry.user_attrs[NUMBER] for entry in entries} == {0}


def test_a_living_trial_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "PERIOD", 0.02)
    trial = StudyTrial(settings(), 0, tmp_path)
    trial.draw()
    beat = TrialFolder.of(tmp_path, 0).path / BEAT
    os.utime(beat, (1, 1))
    until = time.monotonic() + 30
    while beat.stat().st_mtime == 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert beat.stat().st_mtime > 1
    trial.finish(0, "completed", 1.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-heartbeat"]


def test_a_trial_of_somebody_elses_in_the_study_is_left_alone(tmp_path: Path) -> None:
    played(tmp_path, 0, [1.0])
    opened(tmp_path).ask()
    assert fail_dead(tmp_path) == []
    assert opened(tmp_path).trials[1].state.name == "RUNNING"


# -- torn lines -----------------------------------------------------------------------------------------------


def lines(folder: Path) -> list[dict[str, Any]]:
    """The journal's lines, each of which is whole."""
    text = (folder / JOURNAL).read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_that_a_killed_writer_left_is_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    played(tmp_path, 0, [1.0])
    before = lines(tmp_path)
    with open(tmp_path / JOURNAL, "ab") as file:
        file.write(b'{"op_code":4,"worker' + b"x" * 5000)
    assert len(opened(tmp_path).trials) == 1  # it can be read meanwhile
    with caplog.at_level(logging.WARNING, "lockstep"):
        played(tmp_path, 1, [1.0])
    assert "removed a partial last line of 5020 bytes" in caplog.text
    assert lines(tmp_path)[: len(before)] == before
    assert [entry.state.name for entry in opened(tmp_path).trials] == ["COMPLETE"] * 2


@pytest.mark.parametrize("torn", [b'{"op_code":', b"\0" * 20, b"12", b"[]", b"\xff\xfe"])
def test_a_torn_line_amid_others_is_found_and_numbered(torn: bytes, tmp_path: Path) -> None:
    played(tmp_path, 0, [1.0])
    whole = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_bytes(b"".join([*whole[:3], torn + b"\n", *whole[4:]]))
    with pytest.raises(CorruptJournal, match=r"line 4 of .*study\.journal' is damaged .* with `head -n 3"):
        StudyTrial(settings(), 1, tmp_path).draw()


def test_a_line_that_comes_out_otherwise_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = journal._write, []

    def torn(file: int, data: bytes) -> None:
        calls.append(data)
        write(file, data[:5] + b"\0" * (len(data) - 5) if len(calls) == 1 else data)

    monkeypatch.setattr(journal, "_write", torn)
    path = tmp_path / "j"
    StudyJournal(str(path)).append_logs([{"op_code": 1}, {"op_code": 2}])
    assert path.read_bytes() == b'{"op_code":1}\n{"op_code":2}\n'
    assert len(calls) == 2


def test_a_file_that_holds_no_line_as_it_was_written_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = journal._write
    path = tmp_path / "j"
    StudyJournal(str(path)).append_logs([{"op_code": 1}])
    monkeypatch.setattr(journal, "_write", lambda file, data: write(file, b"\0" * len(data)))
    with pytest.raises(CorruptJournal, match="reads back differently after 3 attempts"):
        StudyJournal(str(path)).append_logs([{"op_code": 2}])
    assert path.read_bytes() == b'{"op_code":1}\n'


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = journal._write
    path = tmp_path / "j"
    StudyJournal(str(path)).append_logs([{"op_code": 1}])

    def full(file: int, data: bytes) -> None:
        write(file, data[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "_write", full)
    with pytest.raises(OSError, match="No space"):
        StudyJournal(str(path)).append_logs([{"op_code": 2}])
    assert path.read_bytes() == b'{"op_code":1}\n'
    assert not list(tmp_path.glob("j.lock*"))


# -- the lock -------------------------------------------------------------------------------------------------


def lock(folder: Path, **given: Any) -> FileLock:
    (folder / "j").touch()
    return FileLock(str(folder / "j"), **given)


def test_the_lock_of_a_process_that_died_is_taken_at_once(tmp_path: Path) -> None:
    mine = lock(tmp_path, grace=1e9)
    child = multiprocessing.get_context("fork").Process(target=lambda: (mine.acquire(), os._exit(1)))
    child.start()
    child.join()
    assert os.path.lexists(tmp_path / "j.lock")
    with holding(mine):
        pass
    assert not os.path.lexists(tmp_path / "j.lock")


def test_the_lock_of_another_host_is_taken_after_its_grace(tmp_path: Path) -> None:
    os.symlink("elsewhere|1|1", tmp_path / "j.lock")
    begin = time.monotonic()
    with holding(lock(tmp_path, grace=0.3)):
        assert time.monotonic() - begin >= 0.3


def test_the_lock_of_a_living_process_is_waited_for(tmp_path: Path) -> None:
    first, second, order = lock(tmp_path), lock(tmp_path), []
    first.acquire()

    def wait() -> None:
        with holding(second):
            order.append("second")

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    order.append("first")
    first.release()
    thread.join()
    assert order == ["first", "second"]


def test_optunas_own_tools_and_the_journal_exclude_each_other(tmp_path: Path) -> None:
    theirs = optuna.storages.journal.JournalFileSymlinkLock(str(tmp_path / "j"))
    (tmp_path / "j").touch()
    theirs.acquire()
    done: list[int] = []
    thread = threading.Thread(
        target=lambda: done.append(StudyJournal(str(tmp_path / "j")).append_logs([{"op_code": 1}]))
    )  # type: ignore[func-returns-value]
    thread.start()
    time.sleep(0.3)
    assert not done
    theirs.release()
    thread.join()
    assert done


# -- workers that are killed ----------------------------------------------------------------------------------

TRIALS, WORKERS = 12, 3


def work(folder: Path, worker: int) -> None:
    """A worker plays every third trial, and goes on where it was when it is started again."""
    study.PERIOD, study.DEAD = 0.1, 1.0
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for number in range(worker, TRIALS, WORKERS):
        done = folder / f"done-{number}"
        if not done.exists():
            trial = StudyTrial(settings(), number, folder)
            values = trial.draw()
            for step in range(3):
                time.sleep(0.01)
                if trial.report(step, values["lr"] / (step + 1)):
                    break
            trial.finish(number, "completed", None)
            done.touch()
    os._exit(0)


def test_of_three_workers_one_is_killed_and_no_trial_is_lost(tmp_path: Path) -> None:
    kill_one(tmp_path / "study", 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_workers_killed_at_random_lose_no_trial_and_run_none_twice(number: int, tmp_path: Path) -> None:
    kill_one(tmp_path / "study", number)


def kill_one(folder: Path, seed: int) -> None:
    draws = random.Random(seed)
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(folder, worker)) for worker in range(WORKERS)]
    for process in workers:
        process.start()
    time.sleep(draws.uniform(0, 2.5))
    victim = draws.randrange(WORKERS)
    os.kill(workers[victim].pid or 0, signal.SIGKILL)
    workers[victim].join()
    time.sleep(draws.choice([0, 1.5]))  # at once, or when the others take it for dead
    workers[victim] = context.Process(target=work, args=(folder, victim))
    workers[victim].start()
    for process in workers:
        process.join()
    assert [process.exitcode for process in workers] == [0] * WORKERS
    assert all("op_code" in line for line in lines(folder))
    ended = [entry for entry in opened(folder).trials if entry.state.name in ("COMPLETE", "PRUNED")]
    assert sorted(entry.user_attrs[NUMBER] for entry in ended) == list(range(TRIALS))
    assert not [entry for entry in opened(folder).trials if entry.state.name in ("RUNNING", "WAITING")]
    values = {entry.user_attrs[NUMBER]: entry.params for entry in ended}
    for entry in opened(folder).trials:  # one that was killed while it drew has only some of them
        assert entry.params.items() <= values[entry.user_attrs[NUMBER]].items()
