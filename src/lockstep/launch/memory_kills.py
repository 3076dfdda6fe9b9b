"""Detection of processes that the OOM killer has killed, from the kernel's counts of OOM kills."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
"""Mount point of cgroups."""

MACHINE = Path("/proc/vmstat")
"""File that counts the kills of the whole machine."""

WINDOW = 10.0
"""Seconds that the end of a killed process may take, since its memory is freed first."""

CERTAIN = ": the machine, or its container, ran out of memory"
PERHAPS = (
    ": perhaps the machine ran out of memory: its kernel killed a process for lack of memory at about the same time"
)


class MemoryKills:
    """Detector for processes that the kernel's OOM killer has ended by SIGKILL.

    A kill is certain if the process' own cgroup counted it at about that time. Without such a count, or with that of
    the whole machine, a kill at about that time is only a possible explanation.
    """

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}  # file with the count of a process' cgroup
        self._samples: deque[tuple[float, dict[Path, int]]] = deque()
        self._lock = threading.Lock()
        self.update()

    def add(self, process: int) -> None:
        """Record the cgroup of a running process, which cannot be read after the process has ended."""
        file = _events_of(process)
        with self._lock:
            # cgroup version 1 shows an ending process in the root
            if file is not None and (process not in self._files or file.parent not in (MOUNT, MOUNT / "memory")):
                self._files[process] = file
                for _, counts in self._samples:
                    counts.setdefault(file, _count(file))

    def update(self) -> None:
        """Read the counts of OOM kills, and the processes' cgroups. Call this method about once a second."""
        for process in [*self._files]:
            self.add(process)
        now = time.monotonic()
        with self._lock:
            self._samples.append((now, self._counts()))
            while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
                self._samples.popleft()

    def explain(self, process: int) -> str:
        """Return an explanation if a SIGKILL of the process was, or may have been, due to a lack of memory; else ""."""
        with self._lock:
            own, before = self._files.get(process), self._samples[0][1]
        if own is not None:
            return CERTAIN if _count(own) > before[own] else ""
        return PERHAPS if _count(MACHINE) > before[MACHINE] else ""

    def _counts(self) -> dict[Path, int]:
        return {file: _count(file) for file in {MACHINE, *self._files.values()}}


def _events_of(process: int) -> Path | None:
    """Return the path of the file that counts OOM kills in a process' cgroup. Return None without a cgroup."""
    try:
        lines = Path(f"/proc/{process}/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    first = next((path for controllers, path in found.items() if "memory" in controllers.split(",")), None)
    home, name = (MOUNT / "memory", "memory.oom_control") if first is not None else (MOUNT, "memory.events")
    group = first if first is not None else found.get("", "/")
    # a container may see its own cgroup as the root, regardless of the path
    files = (home / group.lstrip("/") / name, home / name)
    for file in files:
        try:
            # older kernels have the file, but not this line
            if any(line.startswith("oom_kill ") for line in file.read_text().splitlines()):
                return file
        except OSError:
            continue
    return None


def _count(file: Path) -> int:
    """Read the number of OOM kills from a file of the kernel, such as ``memory.events``."""
    try:
        lines = file.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError, IndexError):
        return 0
