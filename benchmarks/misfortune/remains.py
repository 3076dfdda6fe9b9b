"""What a run may leave behind: processes, files in /dev/shm, ports."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SHARED = Path("/dev/shm")
_LISTENS = "0A"


class Port(NamedTuple):
    """A socket that waits for connections."""

    number: int
    inode: int


def family(parents: dict[int, int], ancestor: int) -> list[int]:
    """The processes that came of one, by the parent of each."""
    found: set[int] = set()
    new = {ancestor}
    while new:
        new = {process for process, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


def descendants(ancestor: int) -> list[int]:
    """The processes that came of one and run, or stand still."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", name, "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] not in "ZX":
                    parents[int(name)] = int(fields[1])
    return family(parents, ancestor)


def name_of(process: int) -> str:
    """The command of a process; "" if it is gone."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(b" ".join(words[:4]).decode(errors="replace").split())[:80]


def sockets(table: str) -> set[Port]:
    """The listening ones in the text of /proc/net/tcp."""
    found = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTENS:
            found.add(Port(int(fields[1].rsplit(":", 1)[1], 16), int(fields[9])))
    return found


def listening() -> set[Port]:
    """All on this machine."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            found |= sockets(Path("/proc/net", name).read_text())
    return found


def ports_of(processes: Iterable[int]) -> set[Port]:
    """Those on which these processes listen."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(entry.path)
                    if target.startswith("socket:["):
                        inodes.add(int(target[8:-1]))
    return {port for port in listening() if port.inode in inodes}


def shared_memory() -> set[str]:
    """The names of files in /dev/shm."""
    try:
        return set(os.listdir(SHARED))
    except OSError:
        return set()


def left_in_memory(before: set[str]) -> list[str]:
    """The new files in /dev/shm that stay, and that no process has mapped or open: others are of a neighbour's run.

    Args:
        before: the names of the old ones.
    """
    names = shared_memory() - before
    for _ in range(5):
        if not names:
            break
        time.sleep(0.5)
        names = _nobodys(names & shared_memory())
    return sorted(names)


def _nobodys(names: set[str]) -> set[str]:
    held: set[str] = set()
    for process in os.listdir("/proc"):
        if process.isdigit():
            with contextlib.suppress(OSError):
                maps = Path("/proc", process, "maps").read_text(errors="replace")
                held |= {name for name in names if f"{SHARED}/{name}" in maps}
                links = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{process}/fd")}
                held |= {name for name in names if f"{SHARED}/{name}" in links}
    return names - held
