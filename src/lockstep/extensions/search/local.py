"""The trials of a search on this machine: a process for each, some at a time, with its share of the devices."""

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
"""The function and the options, in the folder of the search, for the trials' processes."""
PROGRAM = "lockstep.extensions.search.local_trial"
"""The module that is a trial's process."""
LOOK = 0.02
"""Seconds from one look at the processes to the next."""
GRACE = 5.0
"""Seconds that a trial gets to end when the search is interrupted."""


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended.

    Attributes:
        number: of the trial.
        state: "completed", "pruned" or "failed".
        hparams: its hyperparameters; None where it ended before they were drawn.
        value: what the function returned, if that was a number.
        metrics: the last that the trial has logged, and the numbers of a dict that the function returned.
        error: of a failed one, in a line.
    """

    number: int
    state: str
    hparams: Any
    value: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Trials:
    """What is to be run.

    Attributes:
        folder: of the search.
        searched: what makes it this search, by name, as JSON holds it.
        values: of each trial, by number, made when the trial is started; None where the trial draws them itself.
        keeps: whether what the trials print goes into their folders, and not to this process' screen.
        devices: of each trial that runs at a time, as CUDA_VISIBLE_DEVICES has them; None: that stays as it is.
        hparams: the hyperparameters of a trial by its number and values.
        lost: told of a trial whose process ended without a last word.
    """

    folder: Path
    searched: Mapping[str, Any]
    values: Iterable[tuple[int, Mapping[str, Any] | None]]
    keeps: bool
    devices: Sequence[str | None]
    hparams: Callable[[Mapping[str, Any], int], Any]
    lost: Callable[[int], None]


def run(call: object, trials: Trials) -> list[TrialOutcome]:
    """Run the trials; gives how each ended, by number.

    A trial that fails is told of, and the others go on. Where the folder has trials that completed, these are not run
    again. A Ctrl-C ends all.

    Args:
        call: what each process needs to call the user's function: that, and what it makes the hyperparameters of.
        trials: which.

    Raises:
        MisconfigurationException: the call cannot travel, or the folder holds another search, or one that runs now.
        RuntimeError: all have failed.
    """
    trials.folder.mkdir(parents=True, exist_ok=True)
    with _alone(trials.folder):
        Search(trials.folder).claim(trials.searched)
        _write_call(call, trials.folder)
        found = _played(trials)
    if found and all(each.state == "failed" for each in found):
        raise RuntimeError(f"all {len(found)} trial(s) have failed; trial {found[0].number}: {found[0].error}")
    return found


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else runs the search of a folder meanwhile.

    Raises:
        MisconfigurationException: somebody does.
    """
    call = folder / CALL
    call.touch()
    lock = FileLock(str(call))
    try:
        holder = lock.take()
    except OSError as error:
        log.warning(
            "%s: no lock can be made (%s): the same search started twice would run its trials twice", folder, error
        )
        holder = ""
    if holder:
        raise MisconfigurationException(
            f"{str(folder)!r} holds a search that runs now, in {holder}: wait for its end, or give another log_path; "
            f"if there is no such process any more, remove {lock.link}"
        )
    try:
        yield
    finally:
        lock.release()


def _played(trials: Trials) -> list[TrialOutcome]:
    """Run the trials; gives how each ended, by number."""
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
            time.sleep(LOOK)
            for process in [each for each in running if each.code() is not None]:
                free.append(running.pop(process))
                outcomes[process.trial.number] = process.outcome(trials)
    finally:
        _end([*running])
    return [outcomes[number] for number in sorted(outcomes)]


def _write_call(call: object, folder: Path) -> None:
    from lockstep.launch.spawn import pack

    try:
        with open(folder / CALL, "wb") as file:
            pickle.dump(list(sys.path), file)
            pack(call, file)
    except OSError:
        raise
    except Exception as error:  # whatever an object raises that cannot be pickled
        raise MisconfigurationException(
            f"the function of the trials cannot be sent to their processes ({type(error).__name__}: {error}): let it "
            "make what it needs by itself, such as open files, locks and connections, and use none of the script's"
        ) from error


def _to_run(trials: Trials, outcomes: dict[int, TrialOutcome]) -> Iterator[TrialFolder]:
    """The trials that have not completed yet, with their values written; of the others, the outcomes."""
    for number, values in trials.values:
        trial = TrialFolder.of(trials.folder, number)
        known = trial.values()
        if known is not None and values is not None and known != values:
            raise MisconfigurationException(
                f"{trial.path} holds a trial with other values ({known}, and here {values}), of another search: give "
                "another log_path, the seed that it had, or remove that folder"
            )
        if values is not None and known is None:
            trial.write_values(values)
        last = read_events(trial.events()).last
        if last is not None and last.end == "completed":
            outcomes[number] = _outcome(trial, trials)
        else:
            trial.path.mkdir(exist_ok=True)
            yield trial


class _Process:
    """The process of a trial."""

    def __init__(self, trial: TrialFolder, trials: Trials, devices: str | None) -> None:
        self.trial = trial
        environ = trial_environment(str(trial.path), len(trials.devices), devices, trials.keeps)
        command = [sys.executable, "-m", PROGRAM, str(trial.path)]
        with contextlib.ExitStack() as files:

            def opened(name: str) -> IO[bytes] | None:
                return files.enter_context(open(trial.path / name, "ab")) if trials.keeps else None

            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=opened(STDOUT), stderr=opened(STDERR)
            )

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def outcome(self, trials: Trials) -> TrialOutcome:
        """How the trial ended."""
        last, code = read_events(self.trial.events()).last, self._process.returncode
        if last is None or last.end is None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            error = f"its process {how}, without a last word of the trial's"
            self.trial.note("failed", attempt=last.number if last is not None else 0, error=error)
            trials.lost(self.trial.number)
        return _outcome(self.trial, trials)


def _outcome(trial: TrialFolder, trials: Trials) -> TrialOutcome:
    """What a trial's folder says of its end."""
    events, values = trial.events(), trial.values()
    last = read_events(events).last
    hparams = None if values is None else trials.hparams(values, trial.number)
    metrics = trial.result().get("metrics", {})
    if last is not None and last.end == "completed":
        return TrialOutcome(trial.number, "pruned" if last.pruned else "completed", hparams, last.value, metrics)
    # one that never began has a failure of no start
    error = events[-1].get("error", "") if last is None else last.error
    log.warning("trial %d failed: %s", trial.number, error)
    return TrialOutcome(trial.number, "failed", hparams, None, metrics, error)


def _end(processes: Sequence[_Process]) -> None:
    """End processes that still run: politely first."""
    for process in processes:
        process.signal(signal.SIGTERM)
    until = time.monotonic() + GRACE
    while any(process.code() is None for process in processes) and time.monotonic() < until:
        time.sleep(LOOK)
    for process in processes:
        process.signal(signal.SIGKILL)
        process._process.wait()


def dealt(devices: Sequence[str], workers: int) -> list[str | None]:
    """The devices of each of some workers; several share one where there are more workers than devices.

    Example:
        >>> dealt(["0", "1", "2", "3"], 2), dealt(["0", "1"], 3), dealt([], 2)
        (['0,2', '1,3'], ['0', '1', '0'], [None, None])
    """
    if not devices:
        return [None] * workers
    if workers > len(devices):
        return [devices[at % len(devices)] for at in range(workers)]
    return [",".join(devices[at::workers]) for at in range(workers)]
