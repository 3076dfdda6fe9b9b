"""Settings of an observed process, its journal of events, and functions that find user code on the stack."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

HOME = [""]
"""The user's current folder, set in each observed process, which itself runs in a copy of the folder."""

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True)
class Settings:
    """Settings of one process that `lockstep verify` starts and observes.

    Attributes:
        words: the script and its arguments, or ``-m``, a module and its arguments.
        folder: folder into which all processes of the run write.
        rank: rank of the process.
        world: number of processes of the run.
        steps: optimizer steps after which the script is stopped.
        epoch_steps: steps after which each epoch of training ends; 0: when its data or all steps are used up.
        max_epochs: epochs of training after which the script is stopped; 0: no limit.
        sigterm_after: optimizer steps after which the process gets SIGTERM, as from a scheduler; 0: never.
        float64: True if all floating-point numbers are float64.
        feed: folders of the ranks whose samples the process is fed, in the order in which they are joined.
        rank_by_rank: True if the samples come one rank after another, not joined to one batch.
        strategy: strategy that Trainers use on several ranks; "" for their own.
        overrides: names of what is changed or observed in addition, such as "world size".
        home: the user's current folder, or its copy at another revision; the script runs in a copy of it.
        moved: a folder, and its copy from which the script imports instead; empty: none.
        port: free port that the script reads as MASTER_PORT.
        simulated: True if the other ranks do not exist and collectives send nothing.
    """

    words: tuple[str, ...]
    folder: str
    rank: int = 0
    world: int = 1
    steps: int = 5
    epoch_steps: int = 0
    max_epochs: int = 0
    sigterm_after: int = 0
    float64: bool = True
    feed: tuple[str, ...] = ()
    rank_by_rank: bool = False
    strategy: str = ""
    overrides: tuple[str, ...] = ()
    home: str = ""
    moved: tuple[str, ...] = ()
    port: int = 0
    simulated: bool = False

    @property
    def own_folder(self) -> Path:
        """Folder into which this rank writes its recording."""
        return Path(self.folder) / f"rank-{self.rank}"

    @property
    def working_folder(self) -> Path:
        """Folder in which the script runs."""
        return Path(self.folder) / "work"

    @property
    def folder_of_ranks(self) -> Path:
        """Folder of the multi-rank run whose recorded samples this process reads."""
        return Path(self.feed[0]).parent

    @property
    def is_replay(self) -> bool:
        """True if this process reads its samples from the recording of another run."""
        return bool(self.feed)


class Journal:
    """Writer of a rank's journal of events, a file with one JSON object per line.

    Args:
        folder: folder of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # buffered by line: the process may be killed at any moment, and its last events explain why it hung
        self._events = open(folder / "events.jsonl", "w", buffering=1)  # noqa: SIM115
        self._written: set[str] = set()

    def record(self, kind: str, **values: object) -> None:
        """Write an event to the journal."""
        self._events.write(json.dumps({"kind": kind, **values}) + "\n")

    def record_once(self, kind: str, **values: object) -> None:
        """Write an event, unless an equal event was written before."""
        key = f"{kind} {values}"
        if key not in self._written:
            self._written.add(key)
            self.record(kind, **values)

    def end(self, status: str, **values: object) -> None:
        """Write ``end.json``, which records how the process ended, and flush the events."""
        (self.folder / "end.json").write_text(json.dumps({"status": status, **values}))
        self._events.flush()


def location(frame: FrameType | None = None) -> str:
    """Return the innermost line of user code on the stack of ``frame`` or the caller, as ``file:line``; "" if none."""
    return next(_lines(frame or sys._getframe(1)), "")


def stack() -> list[str]:
    """Return the lines of user code on the current stack as ``file:line``, innermost first."""
    return list(_lines(sys._getframe(1)))


def call_lines(lines: Sequence[str]) -> str:
    """Format the innermost line of a stack, with the line that called the enclosing function, if any."""
    return ", called at ".join(dict.fromkeys(lines[:2]))


def _lines(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            yield f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back


def short(file: str) -> str:
    """Return a file's path relative to the user's folder, or unchanged if the file is elsewhere."""
    # not relative to the current folder, which is a copy
    path = os.path.relpath(file, HOME[0] or None)
    return file if path.startswith("..") else path


def is_user_code(file: str) -> bool:
    """Return True unless a file belongs to an installed package, to Python or to lockstep."""
    # "<" starts the names of code that has no file, as that of a dataclass
    return not (file.startswith(("<", _PACKAGE, _PYTHON)) or "site-packages" in file)
