"""Processes that the system has killed for lack of memory: in a rank's cgroup, on the machine, and when."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
"""Where the system shows its cgroups."""

MACHINE = Path("/proc/vmstat")
"""The file that counts the kills of the whole machine."""

WINDOW = 10.0
"""Seconds from the system's choice of a process to the end of that process: its memory is freed first."""

CERTAIN = ": the machine, or its container, ran out of memory"
PERHAPS = ": perhaps the machine ran out of memory, since it killed a process for that at about the same time"


class MemoryKills:
    """Explains whether a process that SIGKILL ended was killed for lack of memory.

    A kill counts where it is counted in the process's own cgroup, at about that time. Where there is no such count, or
    it is that of the whole machine, a kill at about that time only says that it may have been this process.
    """

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}  # by process, where its cgroup counts
        self._samples: deque[tuple[float, dict[Path, int]]] = deque()
        self._lock = threading.Lock()
        self.look()

    def add(self, process: int) -> None:
        """Note in which cgroup a process is, while it lives."""
        file = _events_of(process)
        with self._lock:
            # version 1 shows one that is ending in the root
            if file is not None and (process not in self._files or file.parent not in (MOUNT, MOUNT / "memory")):
                self._files[process] = file
                for _, counts in self._samples:
                    counts.setdefault(file, _count(file))

    def look(self) -> None:
        """Read the counts, and in which cgroups processes are by now; called about once a second."""
        for process in [*self._files]:
            self.add(process)
        now = time.monotonic()
        with self._lock:
            self._samples.append((now, self._counts()))
            while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
                self._samples.popleft()

    def why(self, process: int) -> str:
        """Return the words for a process that SIGKILL has just ended; "" where memory was not the reason."""
        with self._lock:
            own, before = self._files.get(process), self._samples[0][1]
        if own is not None:
            return CERTAIN if _count(own) > before[own] else ""
        return PERHAPS if _count(MACHINE) > before[MACHINE] else ""

    def _counts(self) -> dict[Path, int]:
        return {file: _count(file) for file in {MACHINE, *self._files.values()}}


def _events_of(process: int) -> Path | None:
    """Return the file in which the cgroup of a process counts kills; None where there is none."""
    try:
        lines = Path(f"/proc/{process}/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    first = next((path for controllers, path in found.items() if "memory" in controllers.split(",")), None)
    home, name = (MOUNT / "memory", "memory.oom_control") if first is not None else (MOUNT, "memory.events")
    group = first if first is not None else found.get("", "/")
    # a container may see its own cgroup as the root, whatever the path
    files = (home / group.lstrip("/") / name, home / name)
    return next((file for file in files if _has_count(file)), None)


def _has_count(file: Path) -> bool:
    try:
        return any(line.startswith("oom_kill ") for line in file.read_text().splitlines())
    except OSError:
        return False


def _count(file: Path) -> int:
    """Return the kills that a file counts."""
    try:
        lines = file.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError, IndexError):
        return 0
