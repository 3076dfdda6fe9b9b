"""Profiler, what is told when a named action begins and ends; and those by the clock and by cProfile."""

from __future__ import annotations

import io
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log
from lockstep.ground.text_table import padded

if TYPE_CHECKING:
    import cProfile


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

        Raises:
            MisconfigurationException: no report can be written to ``dirpath``.
        """
        self._stage = stage
        self._rank = local_rank
        if self.dirpath is None:
            self.dirpath = log_dir
        elif self.dirpath != log_dir:
            try:
                os.makedirs(self.dirpath, exist_ok=True)
            except OSError as error:
                raise MisconfigurationException(
                    f"{type(self).__name__}(dirpath={self.dirpath!r}): nothing can be written there ({error}); choose "
                    "another folder."
                ) from error

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


# -- by the clock -------------------------------------------------------------------------------------------


class SimpleProfiler(Profiler):
    """Adds up wall-clock seconds by action.

    On a GPU an action ends when its kernels are queued, not when they have run.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        extended: also the number of calls, and the share of the whole time.
    """

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, extended: bool = True
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        #: when the actions that are under way began, in seconds
        self.current_actions: dict[str, float] = {}
        #: seconds of each call, by action
        self.recorded_durations: dict[str, list[float]] = {}
        self.start_time = time.perf_counter()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "current_actions": {}}  # those under way are not a copy's

    def start(self, action_name: str) -> None:
        """An action begins.

        Raises:
            ValueError: it is under way.
        """
        if action_name in self.current_actions:
            raise ValueError(f"the action {action_name!r} has been started and not stopped: give this one another name")
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """An action has ended.

        Raises:
            ValueError: it has not begun.
        """
        now = time.perf_counter()
        if action_name not in self.current_actions:
            raise ValueError(f"the action {action_name!r} was never started: call start({action_name!r}) before")
        began = self.current_actions.pop(action_name)
        self.recorded_durations.setdefault(action_name, []).append(now - began)

    def summary(self) -> str:
        """A table of the actions, the longest in all first."""
        whole = time.perf_counter() - self.start_time
        totals = {action: math.fsum(seconds) for action, seconds in self.recorded_durations.items()}
        rows: list[tuple[str, ...]] = [("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")]
        calls = sum(map(len, self.recorded_durations.values()))
        if self.extended:
            rows.append(("Total", "-", str(calls), f"{whole:.5}", "100 %"))
        for action in sorted(totals, key=lambda name: -totals[name]):
            count, total = len(self.recorded_durations[action]), totals[action]
            rows.append((action, f"{total / count:.5}", str(count), f"{total:.5}", f"{100 * total / whole:.5}"))
        return self.report({}) + _table(rows if self.extended else [(row[0], row[1], row[3]) for row in rows])


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in padded(rows)]
    rule = "-" * len(lines[0])
    text = [rule]
    for number, line in enumerate(lines):
        text.append(line)
        if number == 0 or rows[number][0] == "Total":
            text.append(rule)
    return "\n".join([*text, rule, ""])


# -- by cProfile --------------------------------------------------------------------------------------------


class AdvancedProfiler(Profiler):
    """Runs Python's cProfile in every action; where actions nest, the time counts for the innermost.

    It slows Python down by a multiple: read it for where time goes, not for how much there is.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        line_count_restriction: functions to list for each action: a number of lines, or a share from 0.0 to 1.0.
        dump_stats: also write what was recorded to ``.prof`` files in ``dirpath``, for ``pstats`` and its like.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        #: what was recorded, by action
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._under_way: list[str] = []

    def start(self, action_name: str) -> None:
        """An action begins; the one around it pauses."""
        if self._under_way:
            self.profiled_actions[self._under_way[-1]].disable()
        self._under_way.append(action_name)
        if action_name not in self.profiled_actions:
            import cProfile  # late: for runs that want it

            self.profiled_actions[action_name] = cProfile.Profile()
        self.profiled_actions[action_name].enable()

    def stop(self, action_name: str) -> None:
        """An action has ended; the one around it goes on.

        Raises:
            ValueError: it has not begun.
        """
        if action_name not in self._under_way:
            raise ValueError(f"the action {action_name!r} was never started: call start({action_name!r}) before")
        self.profiled_actions[self._under_way[-1]].disable()
        self._under_way.remove(action_name)
        if self._under_way:
            self.profiled_actions[self._under_way[-1]].enable()

    def summary(self) -> str:
        """For each action its functions, those that take longest first, calls below them included."""
        import pstats

        for action in self._under_way:
            self.profiled_actions[action].disable()
        if self.dump_stats and self.dirpath is not None:
            os.makedirs(self.dirpath, exist_ok=True)
            for action, recorded in self.profiled_actions.items():
                recorded.dump_stats(os.path.join(self.dirpath, self.file_name(action, ".prof")))
        parts = {}
        for action, recorded in self.profiled_actions.items():
            text = io.StringIO()
            pstats.Stats(recorded, stream=text).strip_dirs().sort_stats("cumulative").print_stats(
                self.line_count_restriction
            )
            parts[action] = text.getvalue()
        return self.report(parts)

    def teardown(self, stage: str | None) -> None:
        """Forget what was recorded."""
        for action in self._under_way:
            self.profiled_actions[action].disable()
        self._under_way.clear()
        self.profiled_actions.clear()

    def __getstate__(self) -> dict[str, Any]:  # a cProfile.Profile cannot be pickled
        return {**self.__dict__, "profiled_actions": {}, "_under_way": []}
