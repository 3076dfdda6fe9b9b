"""Profiler: what is told when a named action begins and ends, and reports in the end."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log


class Profiler(ABC):
    """Base of profilers; derive from it and define :meth:`start`, :meth:`stop` and :meth:`summary`.

    The Trainer calls :meth:`setup` before the first hook of a call, :meth:`start` and :meth:`stop` around every
    action, and :meth:`describe` at the end. Without a Trainer, use :meth:`profile` and :meth:`describe` yourself.

    Args:
        dirpath: folder of the report; None: the run's ``trainer.log_dir``, where there is one.
        filename: name of the report, without ending; None: the report is shown on the screen.

    Raises:
        MisconfigurationException: ``dirpath`` is no local folder.

    Example::

        profiler = SimpleProfiler()
        with profiler.profile("read the data"):
            rows = read()
        profiler.describe()
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        if dirpath is not None and "://" in os.fspath(dirpath):
            raise MisconfigurationException(
                f"{type(self).__name__}(dirpath={os.fspath(dirpath)!r}): reports go to a local folder; copy them later."
            )
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self.filename = filename
        self._stage: str | None = None
        self._rank: int | None = None

    # -- actions -------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, action_name: str) -> None:
        """An action begins."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """An action has ended."""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """:meth:`start` and :meth:`stop` around a ``with`` block."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    # -- a run ---------------------------------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A call of the Trainer begins.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: the process' rank, for the report's name; the Trainer gives the global one.
            log_dir: the run's folder, taken where no ``dirpath`` was given.
        """
        self._stage = stage
        self._rank = local_rank
        if self.dirpath is None:
            self.dirpath = log_dir

    def summary(self) -> str:
        """The report as text."""
        return ""

    def describe(self) -> None:
        """Write the report to its file, or on the screen of rank 0, and tear down."""
        text = self.summary()
        if text and self.filename is not None and self.dirpath is not None:
            os.makedirs(self.dirpath, exist_ok=True)
            with open(os.path.join(self.dirpath, self.file_name()), "a", encoding="utf-8") as file:
                file.write(text)
        elif text and self._rank in (None, 0):
            log.info(text)
        self.teardown(self._stage)

    def teardown(self, stage: str | None) -> None:  # noqa: B027, may be left as it is
        """Let go of what was recorded."""

    @property
    def local_rank(self) -> int:
        """The rank that :meth:`setup` was given; 0 without a Trainer."""
        return 0 if self._rank is None else self._rank

    # -- for derived classes -------------------------------------------------------------------------------

    def file_name(self, action_name: str | None = None, extension: str = ".txt") -> str:
        """Name of a file to write: stage, ``filename``, rank and action, in what every file system takes."""
        parts = [self._stage, self.filename, None if self._rank is None else str(self._rank), action_name]
        name = "-".join(part for part in parts if part)
        return (re.sub(r'[\\/:*?"<>|\s_]+', "_", name).strip("_") or "profile") + extension

    def report(self, parts: dict[str, str]) -> str:
        """A text of one part for each action."""
        stage = f"{self._stage.upper()} " if self._stage is not None else ""
        rank = "" if self._rank is None else f" rank: {self._rank}"
        lines = [f"{stage}Profiler Report"]
        for action, text in parts.items():
            lines += [f"Profile stats for: {action}{rank}", text]
        return "\n".join(lines) + "\n"


class PassThroughProfiler(Profiler):
    """Records nothing; what ``trainer.profiler`` is where none was asked for."""

    def start(self, action_name: str) -> None:
        """Nothing."""

    def stop(self, action_name: str) -> None:
        """Nothing."""


def unknown_profiler(flag: object) -> MisconfigurationException:
    """The error for a ``Trainer(profiler=...)`` that is no profiler."""
    return MisconfigurationException(
        f'Trainer(profiler={flag!r}): give None, "simple", "advanced", "pytorch", or a lockstep.profilers.Profiler'
        + ("; lockstep does not run on TPUs." if flag == "xla" else ".")
    )
