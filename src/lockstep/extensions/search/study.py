"""StudyTrial: draws the values of an Optuna trial, and records its reports and final state in a journal file."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.data.order import make_key
from lockstep.extensions.search.grid import Dimension, Options, SearchSettings
from lockstep.extensions.search.journal import StudyJournal
from lockstep.extensions.search.lock import FileLock, holding
from lockstep.extensions.search.trials import JOURNAL, End, TrialFolder
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.rank import log

try:
    import optuna
    from optuna.study import StudyDirection
    from optuna.trial import FrozenTrial, TrialState
except ModuleNotFoundError:
    raise missing_extra("optuna", "optuna", "strategy='optuna'") from None

NUMBER, PRUNED_AT, LOST = "lockstep_trial", "lockstep_pruned_at", "lockstep_lost"
"""User attributes of an entry: number of the trial, report at which it was pruned, why it was considered dead."""
BEAT = "heartbeat"
"""File in a trial's folder that a running trial touches as its heartbeat."""
DRAWS = ".draw.lock"
"""Suffix of the lock file that is held while a trial starts, reports or ends."""
PERIOD = 10.0
"""Seconds between heartbeats."""
DEAD = 120.0
"""Seconds without a heartbeat after which a trial is considered dead."""
LONGEST_DRAW = 120.0
"""Seconds after which another host may take over the lock of a draw."""
PATIENCE = 600.0
"""Seconds that a rank waits for the values that rank 0 draws."""

_ENDS: dict[TrialState, End] = {
    TrialState.COMPLETE: "completed",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_DIRECTIONS = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}
_STATES = {end: state for state, end in _ENDS.items()}


class StudyTrial:
    """Picklable trial of an Optuna study, identified by its number in the search.

    If a trial has reported and starts again, the new start is another entry of the study with the same number and
    values, and the previous entry becomes FAIL. A fit that resumes from a checkpoint inherits the earlier reports
    (:meth:`resume`). A trial that was considered dead, but only paused, gets another entry with its values and reports.

    Args:
        settings: settings of the search.
        number: number of the trial.
        folder: folder of the search, visible to all nodes.
    """

    def __init__(self, settings: SearchSettings, number: int, folder: Path) -> None:
        self.settings, self.number, self.folder = settings, number, folder.absolute()
        self._opened: optuna.Study | None = None
        self._heartbeat: _Heartbeat | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The process that unpickles it opens the journal itself. The heartbeat stays with the process that started it.
        return {**vars(self), "_opened": None, "_heartbeat": None}

    # -- values ----------------------------------------------------------------------------------------------

    def draw(self) -> dict[str, Any]:
        """Draw the trial's missing hyperparameter values, start its heartbeat, and return all values by name.

        Raises:
            MisconfigurationException: the study has other options or another mode.
        """
        with self._drawing():
            # First, so that an earlier start of this trial is not marked as dead here.
            _beat(self._beat)
            _fail_dead(self._study, self.folder)
            params = self._sample(self._start_entry())
        self._heartbeat = _Heartbeat(self._beat)
        return self._values(params)

    def wait(self) -> dict[str, Any]:
        """Wait until rank 0 has drawn the trial's hyperparameter values, and return the values by name.

        Raises:
            TimeoutError: the values were not drawn within `PATIENCE` seconds.
        """
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if (self.folder / JOURNAL).exists():
                with contextlib.suppress(KeyError):  # the study is not created yet
                    found = self._entry()
                    if found is not None and found.params.keys() >= self.settings.space.dimensions.keys():
                        return self._values(found.params)
            time.sleep(0.1)
        raise TimeoutError(
            f"trial {self.number}: rank 0 has drawn no values within {PATIENCE:.0f} s. Check that all nodes see "
            f"{self.folder}"
        )

    def _start_entry(self) -> FrozenTrial:
        """Return the trial's entry in the study. Add a new entry if there is none, or if the trial starts again."""
        if self._entry() is None:
            enqueued = [trial for trial in self._all(TrialState.WAITING) if NUMBER not in trial.user_attrs]
            if enqueued:  # values that a user has enqueued in the study
                self._storage.set_trial_user_attr(enqueued[0]._trial_id, NUMBER, self.number)
            else:
                self._study.enqueue_trial({}, user_attrs={NUMBER: self.number})
        found = self._known_entry()
        if found.state == TrialState.WAITING:
            self._storage.set_trial_state_values(found._trial_id, TrialState.RUNNING)
        has_run = found.state == TrialState.RUNNING and found.intermediate_values
        return self._add_entry(found, keeps=False) if has_run or found.state == TrialState.FAIL else found

    def _sample(self, entry: FrozenTrial) -> dict[str, Any]:
        """Return the hyperparameter values in a trial's Optuna entry. Draw values that are missing.

        If an earlier draw was interrupted, the values that are missing are drawn.
        """
        space = self.settings.space.dimensions
        if entry.params.keys() >= space.keys():
            return entry.params
        trial = optuna.Trial(self._study, entry._trial_id)
        try:
            return {name: _suggest(trial, name, dimension) for name, dimension in space.items()}
        except ValueError as error:
            raise MisconfigurationException(
                f"the study in {self.folder} has other options ({error}). Use another name for the search, or the "
                "earlier options"
            ) from error

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        values = {}
        for name, dimension in self.settings.space.dimensions.items():
            if isinstance(dimension, Options):
                values[name] = dimension[_labels(dimension).index(params[name])]
            else:
                values[name] = dimension.convert(params[name])
        return values

    # -- reports ---------------------------------------------------------------------------------------------

    def resume(self, checks: int) -> None:
        """Prepare the trial's entry for a fit. The entry then contains the reports made before the fit's checkpoint.

        Args:
            checks: number of reports before the fit's checkpoint; 0 without a checkpoint.
        """
        with self._drawing():
            entry = self._running_entry()
            continues = entry.last_step is not None and entry.last_step + 1 == checks
            if entry.state != TrialState.RUNNING or continues:
                return
            earlier = [each for each in self._entries() if checks - 1 in each.intermediate_values]
            if entry.intermediate_values:  # from an earlier fit in this process
                entry = self._add_entry(entry, keeps=False)
            if earlier:
                self._copy_reports(entry, earlier[-1], checks)

    def _copy_reports(self, entry: FrozenTrial, earlier: FrozenTrial, checks: int) -> None:
        """Copy to an entry the first ``checks`` reports of an earlier entry of the trial."""
        for step, value in earlier.intermediate_values.items():
            if step < checks:
                self._storage.set_trial_intermediate_value(entry._trial_id, step, value)
        if earlier.user_attrs.get(PRUNED_AT, checks) < checks:
            self._storage.set_trial_user_attr(entry._trial_id, PRUNED_AT, earlier.user_attrs[PRUNED_AT])

    def report(self, step: int, value: float) -> bool:
        """Report a value to the study. Return True if the study's pruner decides to stop the trial.

        Args:
            step: number of the report. If this fit has reported a value for it before, that value is kept.
            value: value that the search minimizes or maximizes.
        """
        with self._drawing():
            entry = self._running_entry()
            if entry.state != TrialState.RUNNING:  # entries that have ended are not changed
                return entry.state == TrialState.PRUNED
            if step not in entry.intermediate_values:
                self._storage.set_trial_intermediate_value(entry._trial_id, step, value)
                entry = self._known_entry()
            prunes = self._study.pruner.prune(self._study, entry)
            if prunes:
                self._storage.set_trial_user_attr(entry._trial_id, PRUNED_AT, step)
        return prunes

    def finish(self, number: int, state: End, value: float | None) -> End:
        """Report to the study how the trial ended, unless the study has recorded an end already.

        Args:
            number: number of the trial.
            state: how the trial ended.
            value: value of a completed trial; None: the last report.

        Returns:
            The state of the trial that the study has recorded.
        """
        if number != self.number:
            raise ValueError(f"trial {number} cannot be finished here, because this process runs trial {self.number}")
        self.stop_heartbeat()
        with self._drawing():
            entry = self._entry()
            if entry is None:
                raise ValueError(f"trial {number} is not in the study in {self.folder}")
            if entry.state in _ENDS and (LOST not in entry.user_attrs or state == "failed"):
                return _ENDS[entry.state]
            if state == "completed" and PRUNED_AT in entry.user_attrs:
                state = "pruned"
            if state == "completed":
                if value is None and entry.last_step is not None:
                    value = entry.intermediate_values[entry.last_step]
                if value is None or math.isnan(value):
                    log.warning(
                        "trial %d ended with the value %s, so it counts as failed. Return a number from the function, "
                        "or add the callback PruneTrial(monitor=...), which reports one",
                        number, value,
                    )  # fmt: skip
                    state = "failed"
            final_value = value if state == "completed" else None
            self._study.tell(self._running_entry().number, final_value, state=_STATES[state])
            _fail_dead(self._study, self.folder)
        return state

    def _running_entry(self) -> FrozenTrial:
        """Return the trial's entry. If it has failed, return a new running copy with the same values and reports."""
        entry = self._known_entry()
        return self._add_entry(entry, keeps=True) if entry.state == TrialState.FAIL else entry

    def _add_entry(self, entry: FrozenTrial, keeps: bool) -> FrozenTrial:
        """Add a running copy of an entry to the study, and return the copy.

        The copy has the entry's reports only if ``keeps`` is True.

        The original entry becomes FAIL if it is still running.
        """
        if entry.state == TrialState.RUNNING:
            self._study.tell(entry.number, state=TrialState.FAIL)
        # A fit that starts from scratch is not pruned by the report of an earlier one.
        dropped = (LOST,) if keeps else (LOST, PRUNED_AT)
        self._study.add_trial(
            optuna.create_trial(
                state=TrialState.RUNNING,
                params=entry.params,
                distributions=entry.distributions,
                user_attrs={name: value for name, value in entry.user_attrs.items() if name not in dropped},
                intermediate_values=entry.intermediate_values if keeps else {},
            )
        )
        return self._known_entry()

    def mark_failed(self) -> None:
        """Mark the trial, whose process has ended, as failed if the study still lists it as running."""
        with self._drawing():
            entry = self._entry()
            if entry is not None and entry.state == TrialState.RUNNING:
                self._study.tell(entry.number, state=TrialState.FAIL)

    def stop_heartbeat(self) -> None:
        """Stop the thread that signals that the trial is alive."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    # -- the study -------------------------------------------------------------------------------------------

    @property
    def _beat(self) -> Path:
        return TrialFolder.of(self.folder, self.number).path / BEAT

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Lock the study inside the block, so that no other process can start, report or end a trial."""
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / JOURNAL
        journal.touch()
        with holding(FileLock(str(journal), DRAWS, LONGEST_DRAW)):
            if self._opened is None:
                self._opened = self._open(makes=True)
            yield

    @property
    def _study(self) -> optuna.Study:
        if self._opened is None:
            self._opened = self._open(makes=False)
        return self._opened

    @property
    def _storage(self) -> optuna.storages.BaseStorage:
        return self._study._storage

    def _open(self, makes: bool) -> optuna.Study:
        """Open the study in the journal file. Create it if ``makes`` is True and it does not exist.

        Raises:
            KeyError: the study does not exist and ``makes`` is False.
            MisconfigurationException: the study has another mode.
        """
        settings, name = self.settings, self.folder.name
        direction = _DIRECTIONS[settings.mode]
        # Each trial has its own seed, so that trials that start together do not draw the same values.
        seed = make_key("study", settings.seed, self.number) % (1 << 32)
        sampler = (settings.sampler or optuna.samplers.TPESampler)(seed=seed)
        if isinstance(sampler, optuna.samplers.GridSampler):
            raise MisconfigurationException("sampler=GridSampler cannot draw single trials. Use strategy='grid_search'")
        pruner: Any = settings.pruner or optuna.pruners.MedianPruner()
        storage = optuna.storages.JournalStorage(StudyJournal(str(self.folder / JOURNAL)))
        try:
            study = optuna.load_study(study_name=name, storage=storage, sampler=sampler, pruner=pruner)
        except KeyError:
            if not makes:
                raise
            study = optuna.create_study(
                study_name=name, storage=storage, sampler=sampler, pruner=pruner, direction=direction
            )
        if study.direction != direction:
            raise MisconfigurationException(
                f"mode={settings.mode!r}, but the study in {self.folder} is set to {study.direction.name.lower()}. Use "
                "another name for the search, or the earlier mode"
            )
        return study

    def _all(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def _entries(self) -> list[FrozenTrial]:
        """Return all entries of the study that belong to this trial, ordered from the oldest to the newest."""
        return [trial for trial in self._all() if trial.user_attrs.get(NUMBER) == self.number]

    def _entry(self) -> FrozenTrial | None:
        """Return the study's newest entry for this trial, or None if there is no entry."""
        mine = self._entries()
        return mine[-1] if mine else None

    def _known_entry(self) -> FrozenTrial:
        found = self._entry()
        assert found is not None
        return found


def fail_dead(folder: Path) -> list[int]:
    """Mark all trials as failed whose heartbeat has stopped, and return the numbers of these trials.

    Each trial also does this when it starts and ends. This function serves when no trial starts or ends any more.

    Args:
        folder: folder of the search. Nothing happens if it has no study.
    """
    journal = folder / JOURNAL
    if not journal.exists():
        return []
    with holding(FileLock(str(journal), DRAWS, LONGEST_DRAW)):
        try:
            storage = optuna.storages.JournalStorage(StudyJournal(str(journal)))
            study = optuna.load_study(study_name=folder.absolute().name, storage=storage)
        except KeyError:
            return []
        return _fail_dead(study, folder)


def _fail_dead(study: optuna.Study, folder: Path) -> list[int]:
    """Mark the trials whose heartbeat has stopped as failed. The caller must hold the lock."""
    # Heartbeats are times of the file system, whose clock may differ from this node's.
    clock = folder / BEAT
    clock.touch()
    now = clock.stat().st_mtime
    dead = []
    for entry in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        number = entry.user_attrs.get(NUMBER)
        if not isinstance(number, int):  # a trial that the user's own code runs in the study
            continue
        trial = TrialFolder.of(folder, number)
        try:
            silent = now - (trial.path / BEAT).stat().st_mtime
        except FileNotFoundError:
            silent = math.inf
        if silent > DEAD:
            why = f"no heartbeat for {silent:.0f} s"
            study._storage.set_trial_user_attr(entry._trial_id, LOST, why)
            study.tell(entry.number, state=TrialState.FAIL)
            log.warning("trial %d: %s, so it counts as failed until it starts again", number, why)
            dead.append(number)
    return dead


# -- hyperparameters in Optuna --------------------------------------------------------------------------------


def _suggest(trial: optuna.Trial, name: str, dimension: Dimension) -> Any:
    """Return a value that Optuna draws for a hyperparameter."""
    if isinstance(dimension, Options):
        return trial.suggest_categorical(name, _labels(dimension))
    if dimension.whole:
        return trial.suggest_int(name, int(dimension.low), int(dimension.high), log=dimension.log)
    return trial.suggest_float(name, dimension.low, dimension.high, log=dimension.log)


def _labels(options: Options) -> list[Any]:
    """Return a label for each value of a hyperparameter: the value itself if Optuna can store and distinguish them all.

    Otherwise a label is the value's index and text.
    """
    values = list(options.values)
    scalars = all(value is None or type(value) in (bool, int, float, str) for value in values)
    if scalars and all(values.index(value) == at for at, value in enumerate(values)):
        return values
    return [f"{at}: {value}" for at, value in enumerate(values)]


# -- the heartbeat --------------------------------------------------------------------------------------------


def _beat(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


class _Heartbeat:
    """A thread that touches a file until it is stopped or the process ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._ends = path, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(PERIOD):
            with contextlib.suppress(OSError):  # such as a file server that restarts; the next one may succeed
                _beat(self._path)
