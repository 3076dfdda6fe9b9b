"""What a process that runs a script under observation is told, and where it writes what it saw."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

HOME = [""]
"""The folder in which the user is, in a process that runs a script."""

_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Settings:
    """What one process is told.

    Attributes:
        words: the script and its arguments; or ``-m``, a module and its arguments.
        folder: where all processes of this run write.
        rank: of this process.
        world: how many processes there are.
        steps: optimizer steps after which the script is stopped.
        cut: steps behind which each epoch of training ends; 0: at the end of its data, or of all steps.
        epochs: of training, behind which the script is stopped; 0: as many as it makes.
        interrupt: optimizer steps behind which the process gets SIGTERM, as a scheduler sends it; 0: it gets none.
        float64: whether all floating-point numbers are float64.
        feed: folders of the ranks whose samples this process is fed, in the order in which they are put together.
        apart: whether these samples come one rank after another, and not put together.
        strategy: what Trainers are told in place of their own, on several ranks; "" for nothing.
        overrides: what is switched off or told otherwise: "clipping", "rank in modules", "world size".
        once: loaders of which a sample that comes on several ranks is fed once.
        home: the folder in which the user is; the script runs in a copy of it.
        port: where the script is told that ranks meet.
        threads: how many threads torch takes.
        simulated: whether the other ranks are not there, and collectives send nothing.
    """

    words: tuple[str, ...]
    folder: str
    rank: int = 0
    world: int = 1
    steps: int = 5
    cut: int = 0
    epochs: int = 0
    interrupt: int = 0
    float64: bool = True
    feed: tuple[str, ...] = ()
    apart: bool = False
    strategy: str = ""
    overrides: tuple[str, ...] = ()
    once: tuple[int, ...] = ()
    home: str = ""
    port: int = 0
    threads: int = 1
    simulated: bool = False

    @property
    def own_folder(self) -> Path:
        """The folder of this rank."""
        return Path(self.folder) / f"rank-{self.rank}"

    @property
    def working_folder(self) -> Path:
        """The folder in which the script runs."""
        return Path(self.folder) / "work"

    @property
    def folder_of_ranks(self) -> Path:
        """The folder of the run whose samples are fed."""
        return Path(self.feed[0]).parent

    @property
    def is_replay(self) -> bool:
        """Whether the samples come from a recording."""
        return bool(self.feed)

    def write(self) -> str:
        """Write the settings into the rank's folder, and give the path."""
        self.own_folder.mkdir(parents=True, exist_ok=True)
        path = self.own_folder / "settings.json"
        path.write_text(json.dumps(asdict(self)))
        return str(path)

    @classmethod
    def read(cls, path: str) -> Settings:
        """The settings that `write` left."""
        found: dict[str, Any] = json.loads(Path(path).read_text())
        lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return cls(**{**found, **lists})


class Journal:
    """The events of a rank, a line each, written at once: the process may be killed at any moment.

    Args:
        folder: of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._events = open(folder / "events.jsonl", "w", buffering=1)  # noqa: SIM115
        self._noted: set[str] = set()

    def note(self, kind: str, **what: object) -> None:
        """Write an event."""
        self._events.write(json.dumps({"kind": kind, **what}) + "\n")

    def note_once(self, kind: str, **what: object) -> None:
        """Write an event, unless the same one was written so before."""
        key = f"{kind} {what}"
        if key not in self._noted:
            self._noted.add(key)
            self.note(kind, **what)

    def end(self, status: str, **what: object) -> None:
        """Write how the process ended; nothing is noted after it."""
        (self.folder / "end.json").write_text(json.dumps({"status": status, **what}))
        self._events.flush()


def location(frame: FrameType | None = None) -> str:
    """``file:line`` of the user's code that is being run: the innermost frame outside of packages; "" for none."""
    return next(_lines(frame or sys._getframe(1)), "")


def stack() -> list[str]:
    """The lines of the user's code that are being run, the innermost first."""
    return list(_lines(sys._getframe(1)))


def _lines(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back


def short(file: str) -> str:
    """A file's path, relative to the current folder if it lies in it."""
    path = os.path.relpath(file, HOME[0] or None)
    return file if path.startswith("..") else path


def is_users(file: str) -> bool:
    """Whether a file is the user's own, and no package's, Python's or lockstep's."""
    if file.startswith(("<", _HERE)) or "site-packages" in file:
        return False
    return not file.startswith((_PACKAGE, _PYTHON))


_PACKAGE = str(Path(_HERE).parent) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
