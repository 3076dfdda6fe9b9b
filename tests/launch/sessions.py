"""Scripts that run in a session of their own: what of it still runs, and the lines that their comments mark."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path


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
    """Kill what is left of a session."""
    for process in members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def marked(script: Path, mark: str) -> str:
    """``"train.py:14"``: the last line with a comment that has these words."""
    lines = enumerate(script.read_text().splitlines(), 1)
    return f"{script}:{[at for at, text in lines if re.search(rf'# .*{mark}', text)][-1]}"
