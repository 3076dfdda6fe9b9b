"""Started rank processes, watched: when one fails, the others are ended."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

GRACE = 2.0
"""Seconds that a process gets to end by itself before it is killed."""

FAREWELL = 30.0
"""Seconds that a process gets that says it is ending."""


@dataclass(frozen=True)
class Ended:
    """A rank's process that ended by itself, and badly."""

    rank: int
    pid: int
    code: int  #: its exit code, or the negative number of the signal that killed it
    at: float  #: when, on the clock of ``time.monotonic``

    def __str__(self) -> str:
        if self.code < 0:
            try:
                name = signal.Signals(-self.code).name
            except ValueError:
                name = f"signal {-self.code}"
            return f"rank {self.rank} (process {self.pid}) was killed by {name} (exit code {self.code})"
        early = " in the middle of the run" if self.code == 0 else ""
        return f"rank {self.rank} (process {self.pid}) ended{early} with exit code {self.code}"


class Children:
    """The processes of the other ranks.

    Each is waited for by a thread of its own, so that a failure is known within milliseconds and in the
    order in which they happened.

    Args:
        on_failure: called once, in such a thread, when the first process has failed and the others are ended.
        is_busy: whether a rank is in the middle of something, so that its end is a failure whatever its code.
        is_someone_ending: whether a rank that fails, too, is to have more time, to save what it has.
    """

    def __init__(
        self,
        on_failure: Callable[[], None] | None = None,
        is_busy: Callable[[int], bool] | None = None,
        is_someone_ending: Callable[[], bool] | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._is_busy = is_busy
        self._is_someone_ending = is_someone_ending
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._failed: list[Ended] = []
        self._ended: dict[int, float] = {}

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        handed: Sequence[int] = (),
        folder: str | None = None,
    ) -> None:
        """Start the process of a rank. Nobody types at it: its standard input is closed.

        Args:
            rank: which.
            command: the words of its command.
            environ: its environment.
            handed: descriptors of open files that it takes over.
            folder: its working folder; None: the one of this process.
        """
        process = subprocess.Popen(command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, pass_fds=handed)
        self._processes[rank] = process

    def watch(self) -> None:
        """Begin to watch, after all are started."""
        for rank, process in self._processes.items():
            watcher = threading.Thread(
                target=self._watch, args=(rank, process), name=f"lockstep-rank-{rank}", daemon=True
            )
            self._watchers.append(watcher)
            watcher.start()

    @property
    def failed(self) -> list[Ended]:
        """Those that failed by themselves, not by our hand, in order of time."""
        with self._lock:
            return list(self._failed)

    @property
    def ended(self) -> dict[int, float]:
        """Those that have come to a good end, with the time."""
        with self._lock:
            return dict(self._ended)

    @property
    def running(self) -> list[int]:
        """The ranks whose processes run."""
        return [rank for rank, process in self._processes.items() if process.poll() is None]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all have ended and whatever follows from it is done.

        Returns:
            whether they have, in that time.
        """
        until = None if seconds is None else time.monotonic() + seconds
        for watcher in self._watchers:
            watcher.join(None if until is None else max(0.0, until - time.monotonic()))
        return not any(watcher.is_alive() for watcher in self._watchers)

    def stop(self, grace: float = GRACE) -> None:
        """End all that still run, by SIGTERM and after ``grace`` seconds by SIGKILL, and see them gone."""
        with self._lock:
            self._stopping = True
        for process in self._processes.values():
            process.terminate()
        until = time.monotonic() + grace
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code, at = process.wait(), time.monotonic()
        well = code == 0 and not (self._is_busy is not None and self._is_busy(rank))
        with self._lock:
            if well:
                self._ended[rank] = at
            if well or self._stopping:
                return
            self._failed.append(Ended(rank, process.pid, code, at))
            first = len(self._failed) == 1
        if first:
            # others may be about to fail by themselves, one of them as the true cause: let them say so
            until = time.monotonic() + FAREWELL
            time.sleep(GRACE / 4)
            while self._is_someone_ending is not None and self._is_someone_ending() and time.monotonic() < until:
                time.sleep(GRACE / 40)
            self.stop()
            if self._on_failure is not None:
                self._on_failure()
