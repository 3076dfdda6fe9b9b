"""Scripts that run in a session of their own: what of it still runs, and the lines that their comments mark."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def started(
    folder: Path, *command: str, stderr: int = subprocess.PIPE, session: bool = True, **environ: str
) -> subprocess.Popen[str]:
    """A command in a session of its own, or else in a process group, whose ranks have one thread each."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=session,
        preexec_fn=None if session else os.setpgrp,
    )


def members(session: int) -> list[int]:
    """The processes of a session that are not yet gone."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def left_of(session: int) -> list[int]:
    """The processes that a session leaves behind: a process closes its pipes, which is seen, just before it is gone."""
    until = time.monotonic() + 1
    while members(session) and time.monotonic() < until:
        time.sleep(0.01)
    return members(session)


def kill(session: int) -> None:
    """Kill what is left of a session, and see it gone.

    multiprocessing's tracker removes the semaphores of those that were killed, and then ends by itself.
    """
    for process in members(session):
        if not _is_tracker(process):
            _end(process)
    until = time.monotonic() + 5
    while members(session) and time.monotonic() < until:
        time.sleep(0.01)
    for process in members(session):
        _end(process)


def _is_tracker(process: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def marked(script: Path, mark: str) -> str:
    """``"train.py:14"``: the last line with a comment that has these words."""
    lines = enumerate(script.read_text().splitlines(), 1)
    return f"{script}:{[at for at, text in lines if re.search(rf'# .*{mark}', text)][-1]}"


def listeners(session: int) -> list[int]:
    """The ports on which processes of a session listen."""
    inodes = set()
    for process in members(session):
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes})


def disturb(session: int) -> None:
    """Say things to each port that nobody who belongs to the run would say."""
    words = [
        b"\xc3\xa9\n",
        b'{"token": "\xc3\xa9", "node": 2}\n',
        b"{" * 5000 + b"\n",
        b"\xff" * 100,
        b'{"token": 1}\n',
    ]
    ports = listeners(session)
    for port in ports:
        for word in words:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                stranger.sendall(word)
    return len(ports)


class Watched:
    """A script, until nothing of it is left: what it said and when, from the last line that is ``now SECONDS``.

    Args:
        meets: called with the session's number once so many such lines have come.
        moments: how many.
        command: what runs the script.

    Attributes:
        left: processes that it has left behind.
        seconds: from the last such line to its end.
    """

    def __init__(
        self,
        script: Path,
        folder: Path,
        *arguments: str,
        meets: Callable[[int], None] | None = None,
        moments: int = 1,
        command: Sequence[str] = (sys.executable,),
    ) -> None:
        with started(folder, *command, str(script), *arguments, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            said, begun = [], [0.0]
            try:
                for line in process.stdout:
                    said.append((time.monotonic(), line.rstrip("\n")))
                    if line.startswith("now "):
                        begun.append(float(line.split()[1]))
                        if meets is not None and len(begun) > moments:
                            meets(process.pid)
                            meets = None
                self.code = process.wait(60)
                self.left = left_of(process.pid)
            finally:
                kill(process.pid)
        self.seconds = time.monotonic() - max(begun)
        self.lines = [line for _, line in said]
        self.found = [
            (at - max(begun), line) for at, line in said if re.search("(lockstep|spawn'): ", line) and "rank" in line
        ]

    def says(self, *parts: str) -> float:
        """Seconds until a line had all of these, in this order."""
        for at, line in self.found:
            if re.search(".*".join(map(re.escape, parts)), line):
                return at
        raise AssertionError("\n".join(self.lines))
