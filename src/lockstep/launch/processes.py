"""Start and supervision of the ranks' processes on this node. If one process fails, the others are ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.launch.memory_kills import MemoryKills
from lockstep.launch.parent_death import is_alive

GRACE = 2.0
"""Seconds that a process has to end by itself before it is killed."""

SAVE_TIMEOUT = 30.0
"""Seconds that a failed rank has to save its state."""

LOOK = 0.02
"""Seconds between checks of the running processes."""

PERIOD = 0.05
"""Seconds between checks of a process whose end the system does not report."""


class Process(Protocol):
    """Interface of a child process that `RankProcesses` can watch, such as ``subprocess.Popen``."""

    pid: int

    def wait(self) -> int:
        """Wait for the process to end. Return the exit code, or the negative number of the signal that killed it."""


NO_MORE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Error numbers of a system that cannot start more processes."""


@dataclass(frozen=True)
class Ended:
    """Record of a rank's process that failed by itself, without a signal from lockstep."""

    rank: int
    pid: int
    code: int | None  #: its exit code, or the negative number of the signal that killed it; None: unknown
    at: float  #: time of its end, on the clock of ``time.monotonic``
    why: str = ""  #: further explanation

    def __str__(self) -> str:
        if self.code is None:
            how = "is gone: it was killed, or ended by os._exit"
        elif self.code < 0:
            try:
                name = signal.Signals(-self.code).name
            except ValueError:
                name = f"signal {-self.code}"
            how = f"was killed by {name} (exit code {self.code})"
        else:
            early = " in the middle of the run" if self.code == 0 else ""
            how = f"ended{early} with exit code {self.code}"
        return f"rank {self.rank} (process {self.pid}) {how}{self.why}"


class RankProcesses:
    """Supervisor of the ranks' processes on this node. It detects failures and then ends the other ranks.

    A thread waits for each process, so that failures are detected within milliseconds and in order. Each process that
    is started here has a process group of its own.

    Args:
        on_failure: called once, in such a thread, after a process has failed and the others were ended.
        is_busy: whether a rank is inside a call, so that its end is a failure whatever its exit code.
        is_someone_ending: whether a failed rank needs more time to save its state.
        failed_at: time at which a rank reported a failure; None: it has not.
        on_end: called after the end of each process, before any consequences.
        is_excused: whether the end of a rank, with this exit code, is neither success nor failure.
        waits_since: time at which a rank entered its current collective; None: it is in none, or unknown.

    Attributes:
        hurries: whether ranks are ended half a second after each has failed or waits in a collective. It is False for
            ranks that a launcher started, because the launcher needs their own exit codes.
        memory_kills: detects lack of memory as the reason for SIGKILL. Call its ``update`` once a second.
    """

    def __init__(
        self,
        on_failure: Callable[[], None] = lambda: None,
        is_busy: Callable[[int], bool] = lambda rank: False,
        is_someone_ending: Callable[[], bool] = lambda: False,
        failed_at: Callable[[int], float | None] = lambda rank: None,
        on_end: Callable[[int], None] = lambda rank: None,
        is_excused: Callable[[int, int | None], bool] = lambda rank, code: False,
        waits_since: Callable[[int], float | None] = lambda rank: None,
    ) -> None:
        self._on_failure = on_failure
        self._is_busy = is_busy
        self._is_someone_ending = is_someone_ending
        self._failed_at = failed_at
        self._on_end = on_end
        self._is_excused = is_excused
        self._waits_since = waits_since
        self.hurries = True
        self._processes: dict[int, _Started | Foreign] = {}
        # Events, since an interrupted `Thread.join` marks its thread as ended (CPython before 3.13).
        self._watchers: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._stopping = self._winding_up = False
        self._gone: set[int] = set()
        self._failed: list[Ended] = []
        self._ended: dict[int, float] = {}
        self.memory_kills = MemoryKills()

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        handed: Sequence[int] = (),
        folder: str | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Start the process of a rank, with ``/dev/null`` as its standard input.

        Args:
            rank: the rank.
            command: words of the command.
            environ: its environment.
            handed: descriptors of open files that it inherits.
            folder: its working folder; None: that of this process.
            first: function that the new process calls first. Only safe if this process has few threads.

        Raises:
            RuntimeError: the system cannot start more processes.
        """
        group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
        if first is not None:
            group["preexec_fn"] = first
        try:
            process = subprocess.Popen(
                command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, pass_fds=handed, **group
            )
        except OSError as error:
            if error.errno not in NO_MORE:
                raise
            limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
            most = "" if limit == resource.RLIM_INFINITY else f" is {limit}"
            raise RuntimeError(
                f"rank {rank} could not be started ({error.strerror}): the limit of processes (`ulimit -u`{most}), the "
                "limit of open files (`ulimit -n`) or the memory is exhausted. Raise the limit, or use fewer devices"
            ) from None
        self._processes[rank] = _Started(process, group=True)

    def add(self, rank: int, process: Process) -> None:
        """Watch a rank's process that other code has started as a child of this process."""
        self._processes[rank] = _Started(process, group=False)

    def adopt(self, rank: int, process: Foreign, stop: bool = True) -> None:
        """Watch a rank's process that is not a child of this process.

        Args:
            rank: the rank.
            process: the rank's process.
            stop: whether :meth:`stop` also ends the process.
        """
        process.stops = stop
        self._processes[rank] = process

    def watch(self) -> None:
        """Start a watching thread for each process that has none. The thread waits for the process to end."""
        for rank, process in list(self._processes.items()):
            if rank not in self._watchers:
                self.memory_kills.add(process.pid)
                over, name = threading.Event(), f"lockstep-rank-{rank}"
                thread = threading.Thread(target=self._watch, args=(rank, process, over), name=name, daemon=True)
                thread.start()
                self._watchers[rank] = over

    @property
    def failed(self) -> list[Ended]:
        """Records of the processes that failed by themselves, in the order in which they failed."""
        with self._lock:
            return list(self._failed)

    @property
    def ended(self) -> dict[int, float]:
        """Time at which each successful rank ended, by rank, on the clock of ``time.monotonic``."""
        with self._lock:
            return dict(self._ended)

    @property
    def running(self) -> list[int]:
        """Ranks that are still running: their processes have not ended, and their scripts have not reported an end."""
        with self._lock:
            return [rank for rank in self._processes if rank not in self._gone]

    def record_end(self, rank: int, at: float | None) -> None:
        """Record that the script of a rank has ended. The rank's process still waits for permission to exit.

        Args:
            rank: the rank.
            at: time of a successful end; None if the script failed.
        """
        with self._lock:
            self._gone.add(rank)
            if at is not None:
                self._ended[rank] = at

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all processes have ended and their failures have been handled, for at most ``seconds``.

        Returns:
            True if all processes have ended within ``seconds``.
        """
        until = None if seconds is None else time.monotonic() + seconds
        for over in list(self._watchers.values()):
            over.wait(None if until is None else max(0.0, until - time.monotonic()))
        return all(over.is_set() for over in self._watchers.values())

    def stop(self, grace: float = GRACE) -> None:
        """End all running processes by SIGTERM, and by SIGKILL after ``grace`` seconds. Wait until they have ended."""
        with self._lock:
            self._stopping = True
        processes = [process for process in self._processes.values() if process.stops]
        try:
            self.watch()  # the watching threads detect their ends
        except RuntimeError:  # no more threads can be started
            for process in processes:
                process.signal_group(signal.SIGKILL)
            return
        try:
            self._end(processes, grace)
        except KeyboardInterrupt:
            # nobody waits any longer, and no rank may continue alone
            for process in processes:
                process.signal(signal.SIGKILL)
                process.signal_group(signal.SIGKILL)
            raise

    @staticmethod
    def _end(processes: Sequence[_Started | Foreign], grace: float) -> None:
        for process in processes:
            process.signal(signal.SIGTERM)
        until = time.monotonic() + grace
        for process in processes:
            if not process.wait(0.0 if is_stopped(process.pid) else max(0.0, until - time.monotonic())):
                process.signal(signal.SIGKILL)
                process.wait()
            process.signal_group(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to each rank that this process has started."""
        for process in self._processes.values():
            if isinstance(process, _Started):
                process.signal(number)

    def signal_groups(self, number: int) -> None:
        """Send a signal to each rank that this process has started, and to the rank's child processes."""
        for process in self._processes.values():
            process.signal_group(number)

    def wind_up(self, at: float) -> None:
        """End all ranks after a failure. First wait for the ranks to raise their own errors and to save their state.

        Args:
            at: time of the failure, on the clock of ``time.monotonic``.
        """
        with self._lock:
            if self._winding_up or self._stopping:
                return
            self._winding_up = True
        # others may be about to fail by themselves, one of them as the true cause: let them report it
        moved, before = time.monotonic(), self.running
        until, latest = at + GRACE, moved + SAVE_TIMEOUT
        while running := self.running:
            now, failures = time.monotonic(), [self._failed_since(rank, at) for rank in running]
            if running != before:
                moved, before = now, running
            if self.hurries and all(failures):
                # they only have to finish
                until = min(until, max(failures) + GRACE / 4)
            elif self.hurries and now >= max(moved, *failures) + GRACE / 4:
                # gloo fails on ranks connected to an ended one; ranks connected to those wait for nothing
                others = [rank for rank, failed_at in zip(running, failures, strict=True) if not failed_at]
                waiting = [self._waits_since(rank) for rank in others]
                if all(since is not None and now >= since + GRACE / 4 for since in waiting):
                    until = now
            if now >= until and not (now < latest and self._is_someone_ending()):
                break
            time.sleep(LOOK)
        self.stop(GRACE / 8)
        self._on_failure()

    def _failed_since(self, rank: int, at: float) -> float:
        """Return the time at which a rank reported a failure; 0 if none later than `GRACE` seconds before ``at``."""
        failed_at = self._failed_at(rank)
        return failed_at if failed_at is not None and failed_at > at - GRACE else 0.0

    def _watch(self, rank: int, process: _Started | Foreign, over: threading.Event) -> None:
        try:
            code, at = process.end(), time.monotonic()
            excused = self._is_excused(rank, code)
            with self._lock:
                # successful if it reported so, or by its exit code if it reported nothing
                is_success = rank in self._ended or (code == 0 and not self._is_busy(rank))
                self._gone.add(rank)
                if is_success:
                    self._ended.setdefault(rank, at)
                fails = not (is_success or excused or self._stopping)
                if fails:
                    why = self.memory_kills.explain(process.pid) if code in (None, -signal.SIGKILL) else ""
                    self._failed.append(Ended(rank, process.pid, code, at, why))
            self._on_end(rank)
            if not is_success:
                # its loader workers and other children would hold its files and its device
                process.signal_group(signal.SIGKILL)
            if fails:
                failed_at = self._failed_at(rank)
                self.wind_up(at if failed_at is None else min(at, failed_at))
            process.close()
        finally:
            over.set()


class _Started:
    """Handle of a rank's process that is a child of this process."""

    stops = True

    def __init__(self, process: Process, group: bool) -> None:
        self._process = process
        self._group = group
        self.pid = process.pid
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._buried = False

    def end(self) -> int:
        """Wait for the process to end, and return its exit code. Its id cannot be reused before :meth:`close`."""
        code = None
        if hasattr(os, "waitid"):  # not on macOS
            with contextlib.suppress(ChildProcessError):
                info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
                if info is not None:
                    code = int(info.si_status if info.si_code == os.CLD_EXITED else -info.si_status)
        if code is None:
            code, self._buried = self._process.wait(), True
        self._over.set()
        return code

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the process to end. Return True if it has ended within ``seconds``."""
        return self._over.wait(seconds)

    def signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        with contextlib.suppress(ProcessLookupError):
            if not self._over.is_set():
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and its children, even after the process has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._group and not self._buried:
                os.killpg(self.pid, number)

    def close(self) -> None:
        """Reap the ended process. The system may then reuse its id."""
        with self._lock:
            self._process.wait()
            self._buried = True


class Foreign:
    """Handle of a rank's process that another process has started. Its exit code may be unknown.

    Args:
        pid: process id.
        reported: returns the exit code that the process has announced. Called after its end, if the system does not
            report the code.

    Attributes:
        stops: whether :meth:`RankProcesses.stop` also ends the process.
    """

    def __init__(self, pid: int, reported: Callable[[], int | None] = lambda: None) -> None:
        self.pid = pid
        self.stops = True
        self._reported = reported
        self._code: int | None = None
        self._is_parent = os.getppid() == pid
        self._ended = False
        self._descriptor: int | None = None
        # other systems, and Linux before 5.3
        with contextlib.suppress(AttributeError, OSError):
            self._descriptor = os.pidfd_open(pid)

    def end(self) -> int | None:
        """Wait for the process to end. Return the exit code (negative for a signal), or None if it is unknown."""
        self.wait()
        return self._code

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the process to end. Return True if it has ended within ``seconds``."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._ended:
            left = None if until is None else max(0.0, until - time.monotonic())
            if self._descriptor is not None:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLIN)
                gone = bool(poll.poll(None if left is None else left * 1000))
            else:
                gone = not self._is_there()
            if gone:
                code = _exit_code(self.pid, self._descriptor)
                self._code = self._reported() if code is None else code
                self._ended = True
            elif left == 0:
                return False
            elif self._descriptor is None:
                time.sleep(PERIOD if left is None else min(PERIOD, left))
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        with contextlib.suppress(OSError):  # it has ended
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif not self._ended:
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Do nothing, because another process manages the group."""

    def close(self) -> None:
        """Close the file descriptor (pidfd) of the process."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_there(self) -> bool:
        return os.getppid() == self.pid if self._is_parent else is_alive(self.pid)


def stat_of(process: int | str) -> list[str]:
    """Return the fields of ``/proc/<process>/stat``, from the state on. ``"7/task/8"`` is thread 8 of process 7.

    Raises:
        OSError: there is no such process, or the system has no /proc.
    """
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    if not fields:
        raise ProcessLookupError(f"process {process} is gone")
    return fields


def is_stopped(process: int) -> bool:
    """Return True if a process is stopped, for instance by SIGSTOP. A stopped process reacts only to SIGKILL."""
    try:
        return stat_of(process)[0] in "Tt"
    except OSError:
        return False


_INFO = 0xC040FF0B
"""Number of Linux' ioctl ``PIDFD_GET_INFO``, which returns the first 64 bytes of ``struct pidfd_info``."""

_EXIT = 1 << 3
"""Bit ``PIDFD_INFO_EXIT`` in the first field. It requests the exit code, and is set if the code is available."""


def _exit_code(process: int, descriptor: int | None) -> int | None:
    """Return the exit code of an ended process that is not a child of this process. Return None if it is unknown."""
    # at once: /proc shows the code until the parent reaps the process
    with contextlib.suppress(OSError):
        fields = stat_of(process)
        if fields[0] in "ZX":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    # of a reaped process, Linux 6.15 and later report it for a descriptor
    if descriptor is not None:
        info = bytearray(struct.pack("Q56x", _EXIT))
        with contextlib.suppress(OSError):
            fcntl.ioctl(descriptor, _INFO, info)
            available, status = struct.unpack("Q52xi", info)
            if available & _EXIT:
                return os.waitstatus_to_exitcode(status)
    return None
