"""Runs commands as a user would, at a terminal, and sees when the last process that came of them is gone."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import remains
from .screen import Piece

LOOK = 0.01
"""Seconds between two looks at the processes: what a time may be too long by."""
START = 120.0
"""Seconds until the event has to come, if nobody says."""
ORPHANED = 3.0
"""Seconds after the end of the commands from which on a process that came of them counts as an orphan."""
Enough = Callable[[list[list[Piece]]], bool]
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Command:
    """What a user types."""

    words: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A run, from its start to the end of its last process. Times are of ``time.monotonic``."""

    event: float | None  #: when it happened, as the script wrote it
    gone: float  #: when the last process was gone
    screens: list[list[Piece]]  #: what each command printed
    codes: list[int]  #: how each command ended: its exit code, or the negative number of a signal
    ended: bool  #: whether it ended by itself
    left: list[str]  #: orphans, files in /dev/shm, held ports

    def plain(self) -> dict[str, Any]:
        """In types of JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Seen:
        """The inverse of :meth:`plain`."""
        screens = [[Piece(**piece) for piece in screen] for screen in plain["screens"]]
        return cls(**{**plain, "screens": screens})


def adopt() -> None:
    """Become the parent of every process that a run leaves behind, so that the end of each can be seen.

    Raises:
        OSError: the system cannot do that; Linux can.
    """
    if not sys.platform.startswith("linux"):
        raise OSError("processes that outlive their parents can be seen on Linux only")
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no subreaper")


class _Run:
    """The commands, their terminals, and the processes that came of them."""

    def __init__(self, commands: Sequence[Command], folder: Path) -> None:
        self.folder, self.event = folder, folder / "event"
        self.screens: list[list[Piece]] = [[] for _ in commands]
        self.codes: dict[int, int] = {}
        self.ports: set[remains.Port] = set()
        self.before = remains.shared_memory()
        self._masters: dict[int, int] = {}
        self._processes = []
        for number, command in enumerate(commands):
            master, terminal = pty.openpty()
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "EVENT": str(self.event), **command.environ}
            process = subprocess.Popen(
                list(command.words),
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )
            os.close(terminal)
            self._masters[master] = number
            self._processes.append(process)

    @property
    def are_commands_over(self) -> bool:
        return all(process.pid in self.codes for process in self._processes)

    def read(self, seconds: float) -> None:
        """Take in what is printed in that time."""
        until = time.monotonic() + seconds
        while True:
            ready, _, _ = select.select(list(self._masters), [], [], max(0.0, until - time.monotonic()))
            for master in ready:
                try:
                    text = os.read(master, 65536)
                except OSError:  # nobody has the terminal any more
                    text = b""
                if text:
                    piece = Piece(time.monotonic(), text.decode(errors="replace"))
                    self.screens[self._masters[master]].append(piece)
                else:
                    os.close(master)
                    del self._masters[master]
            if not ready:
                return

    def reap(self) -> bool:
        """Take note of processes that have ended; whether none is left."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if process == 0:
                return False
            self.codes[process] = os.waitstatus_to_exitcode(status)

    def held(self) -> list[str]:
        """The ports of the run on which somebody still listens."""
        return [f"port {port.number}" for port in sorted(self.ports & remains.listening())]

    def result(self, gone: float, ended: bool, orphans: list[str]) -> Seen:
        for process in self._processes:
            process.returncode = self.codes[process.pid]  # it was waited for here
        for master in self._masters:
            os.close(master)
        event = float(self.event.read_text()) if self.event.exists() else None
        left = [*orphans, *(f"/dev/shm/{name}" for name in remains.left_in_memory(self.before)), *self.held()]
        codes = [self.codes[process.pid] for process in self._processes]
        return Seen(event, gone, self.screens, codes, ended, left)


def watched(
    commands: Sequence[Command],
    seconds: float,
    enough: Enough = lambda screens: False,
    start: float = START,
) -> Seen:
    """Run commands side by side in a fresh folder until the last process that came of them is gone.

    This process must have called :func:`adopt`, and must have no other children.

    Args:
        commands: each gets a terminal of its own, and the variable EVENT: a file for the time of what happens.
        seconds: from the event on, after which they are asked to end, and killed 5 seconds later. If there is no
            event, ``start`` counts.
        enough: told now and then what the commands have printed: whether they are to be asked to end.
        start: seconds until the event has to come.
    """
    folder = Path(tempfile.mkdtemp(prefix="misfortune-"))
    try:
        return _watch(_Run(commands, folder), seconds, enough, start)
    finally:  # a Ctrl-C does not reach their sessions
        _signal(remains.descendants(os.getpid()), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _watch(run: _Run, seconds: float, enough: Enough, start: float) -> Seen:
    begun = looked = time.monotonic()
    happened, asked, over, orphans = 0.0, 0.0, 0.0, list[str]()
    while not run.reap():
        run.read(LOOK)
        now = time.monotonic()
        if not happened and (run.event.exists() or now - looked > 0.5):
            happened, looked = now if run.event.exists() else 0.0, now
            run.ports |= remains.ports_of(remains.descendants(os.getpid()))
        if run.are_commands_over:
            over = over or now
            if now - over > ORPHANED and not orphans:
                orphans = [f"process {remains.name_of(process)}" for process in remains.descendants(os.getpid())]
                orphans += run.held()
            if now - over > 2 * ORPHANED:
                _signal(remains.descendants(os.getpid()), signal.SIGKILL)
        elif not asked and (now > (happened + seconds if happened else begun + start) or enough(run.screens)):
            asked = now
            _signal([process.pid for process in run._processes], signal.SIGTERM)
        elif asked and now - asked > 5.0:
            _signal(remains.descendants(os.getpid()), signal.SIGKILL)
    gone = time.monotonic()
    run.read(0.0)
    return run.result(gone, not asked, orphans)


def _signal(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
