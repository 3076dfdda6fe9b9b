"""A limit of memory for a rank that is to run out of it: a control group of Linux, where one can be made."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def groups(table: str) -> dict[str, str]:
    """The control groups in the text of /proc/self/cgroup: paths by controller; "" is version 2's."""
    found = {}
    for line in table.splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


class LimitedMemory:
    """A control group below this process' own, empty at first.

    Args:
        megabytes: what the processes that join it may take from then on.

    Attributes:
        folder: a process joins by writing its id to the file cgroup.procs there; "" where none could be made.
    """

    def __init__(self, megabytes: int = 32) -> None:
        self.folder = ""
        limit = megabytes * 2**20
        with contextlib.suppress(OSError):
            own = groups(Path("/proc/self/cgroup").read_text())
            if "memory" in own:
                limits = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
                self._make(ROOT / "memory" / own["memory"].lstrip("/"), limits)
            elif "" in own:
                self._make(ROOT / own[""].lstrip("/"), {"memory.max": limit, "memory.swap.max": 0})

    def _make(self, parent: Path, limits: dict[str, int]) -> None:
        made = parent / f"misfortune-{os.getpid()}"
        made.mkdir()
        try:
            for number, (name, limit) in enumerate(limits.items()):
                if number == 0 or (made / name).exists():  # swap is not counted everywhere
                    (made / name).write_text(str(limit))
        except OSError:
            made.rmdir()
            raise
        self.folder = str(made)

    def close(self) -> None:
        """Take it away."""
        if self.folder:
            os.rmdir(self.folder)
            self.folder = ""
