"""Execution of a search's trials on this machine: several at a time, each in its own process."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lockstep.extensions.search.lock import FileLock
from lockstep.extensions.search.search import Search
from lockstep.extensions.search.trials import STDERR, STDOUT, TrialFolder, read_events
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log
from lockstep.launch.environment import trial_environment

CALL = "call.pkl"
"""File in the folder of a search with the pickled function and options, read by the trials' processes."""
PROGRAM = "lockstep.extensions.search.local_trial"
"""Module that runs as a trial's process."""
POLL = 0.02
"""Seconds between checks of the processes."""
GRACE = 5.0
"""Seconds that a trial has to end after an interrupt before it is killed."""


@dataclass(frozen=True)
class TrialOutcome:
    """Result of a trial: its state, hyperparameters, value, metrics and error.

    Attributes:
        number: number of the trial.
        state: "completed", "pruned" or "failed".
        hparams: hyperparameters of the trial; None if it ended before they were drawn.
        value: return value of the function, if it is a number.
        metrics: newest metrics that the trial logged, and the numbers of a returned dict.
        error: reason of a failure, in one line.
    """

    number: int
    state: str
    hparams: Any
    value: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Trials:
    """Arguments of :func:`run`: the trials of a search, and the settings with which they run on this machine.

    Attributes:
        folder: folder of the search.
        description: description of the search by name, as JSON values, to recognize it.
        values: number and values of each trial, drawn on demand; None for a trial that draws its own values.
        keeps_output: write the output of the trials to their folders instead of this process's output.
        devices: value of CUDA_VISIBLE_DEVICES for each of the trials that run at a time; None leaves it unchanged.
        hparams: returns the hyperparameters of a trial from its values and number.
        on_lost: called with the number of a trial whose process ended without reporting its end.
    """

    folder: Path
    description: Mapping[str, Any]
    values: Iterable[tuple[int, Mapping[str, Any] | None]]
    keeps_output: bool
    devices: Sequence[str | None]
    hparams: Callable[[Mapping[str, Any], int], Any]
    on_lost: Callable[[int], None]


def run(call: object, trials: Trials) -> list[TrialOutcome]:
    """Run the trials and return their outcomes, sorted by number.

    A failed trial is logged, and the others continue. Trials that have completed in this folder are not run again.
    Ctrl-C ends all trials.

    Args:
        call: the user's function with everything that a process needs to create its hyperparameters. It is pickled.
        trials: the trials to run.

    Raises:
        MisconfigurationException: the call cannot be pickled, or the folder contains another search or a running one.
        RuntimeError: all trials failed.
    """
    trials.folder.mkdir(parents=True, exist_ok=True)
    with _exclusively(trials.folder):
        Search(trials.folder).claim(trials.description)
        _write_call(call, trials.folder)
        outcomes: dict[int, TrialOutcome] = {}
        free, running = list(reversed(trials.devices)), dict[_Process, str | None]()
        waiting = _to_run(trials, outcomes)
        try:
            while True:
                while free and (trial := next(waiting, None)) is not None:
                    devices = free.pop()
                    running[_Process(trial, trials, devices)] = devices
                if not running:
                    break
                time.sleep(POLL)
                for process in [each for each in running if each.code() is not None]:
                    free.append(running.pop(process))
                    outcomes[process.trial.number] = process.outcome(trials)
        finally:
            _end([*running])
    found = [outcomes[number] for number in sorted(outcomes)]
    if found and all(each.state == "failed" for each in found):
        raise RuntimeError(f"all {len(found)} trial(s) failed. Trial {found[0].number}: {found[0].error}")
    return found


@contextlib.contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    """Hold the lock of a search's folder within a context, so that no other process runs the same search.

    Raises:
        MisconfigurationException: another process runs the search.
    """
    call = folder / CALL
    call.touch()
    lock = FileLock(str(call))
    try:
        holder = lock.take()
    except OSError as error:
        log.warning(
            "%s: the lock cannot be created (%s), so the search runs without it. Do not start the same search again "
            "while it runs, because its trials would run twice",
            folder,
            error,
        )
        holder = ""
    if holder:
        raise MisconfigurationException(
            f"{str(folder)!r} contains a search that is running in {holder}. Wait until it ends, or use another "
            f"log_path. If that process no longer exists, remove {lock.link}"
        )
    try:
        yield
    finally:
        lock.release()


def _write_call(call: object, folder: Path) -> None:
    from lockstep.launch.spawn import pack

    try:
        with open(folder / CALL, "wb") as file:
            # The function may come from modules that only the script's sys.path has.
            pickle.dump(list(sys.path), file)
            pack(call, file)
    except OSError:
        raise
    except Exception as error:  # an object that cannot be pickled may raise anything
        raise MisconfigurationException(
            f"the function of the trials cannot be pickled for their processes ({type(error).__name__}: {error}). "
            "Create files, locks and connections inside the function instead of using those of the script"
        ) from error


def _to_run(trials: Trials, outcomes: dict[int, TrialOutcome]) -> Iterator[TrialFolder]:
    """Write each trial's values to its folder, and yield the trials that still have to run.

    The outcomes of completed trials are added to ``outcomes``.
    """
    for number, values in trials.values:
        trial = TrialFolder.of(trials.folder, number)
        known = trial.values()
        if known is not None and values is not None and known != values:
            raise MisconfigurationException(
                f"{trial.path} contains a trial of another search, with values {known} instead of {values}. Use "
                "another log_path or the earlier seed, or remove the folder"
            )
        if values is not None and known is None:
            trial.write_values(values)
        # Completed trials are not run again; failed ones are.
        last = read_events(trial.events()).last
        if last is not None and last.end == "completed":
            outcomes[number] = _outcome(trial, trials)
        else:
            trial.path.mkdir(exist_ok=True)
            yield trial


class _Process:
    """A process that runs one trial."""

    def __init__(self, trial: TrialFolder, trials: Trials, devices: str | None) -> None:
        self.trial = trial
        environ = trial_environment(str(trial.path), len(trials.devices), devices, trials.keeps_output)
        command = [sys.executable, "-m", PROGRAM, str(trial.path)]
        with contextlib.ExitStack() as files:

            def opened(name: str) -> IO[bytes] | None:
                return files.enter_context(open(trial.path / name, "ab")) if trials.keeps_output else None

            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=opened(STDOUT), stderr=opened(STDERR)
            )

    def code(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def outcome(self, trials: Trials) -> TrialOutcome:
        """Return the trial's outcome. Record a failure if the process has not reported the end of the trial."""
        last, code = read_events(self.trial.events()).last, self._process.returncode
        if last is None or last.end is None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            error = f"its process {how} without reporting the trial's end"
            self.trial.note("failed", attempt=last.number if last is not None else 0, error=error)
            trials.on_lost(self.trial.number)
        return _outcome(self.trial, trials)


def _outcome(trial: TrialFolder, trials: Trials) -> TrialOutcome:
    """Read a trial's outcome from its folder."""
    events, values = trial.events(), trial.values()
    last = read_events(events).last
    hparams = None if values is None else trials.hparams(values, trial.number)
    metrics = trial.result().get("metrics", {})
    if last is not None and last.end == "completed":
        return TrialOutcome(trial.number, "pruned" if last.pruned else "completed", hparams, last.value, metrics)
    # A trial that never started has a failure event, but no attempt.
    error = events[-1].get("error", "") if last is None else last.error
    log.warning("trial %d failed: %s", trial.number, error)
    return TrialOutcome(trial.number, "failed", hparams, None, metrics, error)


def _end(processes: Sequence[_Process]) -> None:
    """Send SIGTERM to running processes, and SIGKILL to those that still run after `GRACE` seconds."""
    for process in processes:
        process.signal(signal.SIGTERM)
    until = time.monotonic() + GRACE
    while any(process.code() is None for process in processes) and time.monotonic() < until:
        time.sleep(POLL)
    for process in processes:
        process.signal(signal.SIGKILL)
        process._process.wait()


def share_devices(devices: Sequence[str], workers: int) -> list[str | None]:
    """Divide devices among workers; return for each worker the value of CUDA_VISIBLE_DEVICES.

    If there are more workers than devices, several workers use the same device. Without devices, the values are None.

    Example:
        >>> share_devices(["0", "1", "2", "3"], 2), share_devices(["0", "1"], 3), share_devices([], 2)
        (['0,2', '1,3'], ['0', '1', '0'], [None, None])
    """
    if not devices:
        return [None] * workers
    if workers > len(devices):
        return [devices[at % len(devices)] for at in range(workers)]
    return [",".join(devices[at::workers]) for at in range(workers)]
