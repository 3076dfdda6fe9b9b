"""Base class of profilers, and the profilers that use wall-clock time and cProfile."""

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
    """Base class of profilers. A subclass defines :meth:`start`, :meth:`stop` and :meth:`summary`.

    The Trainer calls :meth:`setup` before the first hook of a call, :meth:`start` and :meth:`stop` around every
    action, and :meth:`describe` at the end. Without a Trainer, call :meth:`profile` and :meth:`describe` yourself.

    Args:
        dirpath: folder of the report; None: ``trainer.log_dir`` of the run, if there is one.
        filename: name of the report, without extension; None: print the report on rank 0.

    Raises:
        MisconfigurationException: ``dirpath`` is a URL.

    Example::

        profiler = SimpleProfiler()
        with profiler.profile("read the data"):
            rows = read()
        profiler.describe()
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        if dirpath is not None and "://" in os.fspath(dirpath):
            raise MisconfigurationException(
                f"{type(self).__name__}(dirpath={os.fspath(dirpath)!r}): reports cannot be written to a URL. Pass "
                "a local folder."
            )
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self.filename = filename
        self._stage: str | None = None
        self._rank: int | None = None

    # -- actions -------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Start measuring an action.

        Args:
            action_name: name of the action in the report.
        """

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """Stop measuring an action.

        Args:
            action_name: name that was passed to :meth:`start`.
        """

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Measure the code of a ``with`` block as the action ``action_name``.

        Args:
            action_name: name of the action in the report.

        Yields:
            the name.

        Example::

            with profiler.profile("augment"):
                batch = augment(batch)
        """
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    # -- a run ---------------------------------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Prepare the profiler for a fit, validation, test or prediction.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: rank for the report's name; the Trainer passes the global rank. None: no rank in the name.
            log_dir: folder of the report if there is no ``dirpath``.

        Raises:
            MisconfigurationException: ``dirpath`` cannot be created.
        """
        self._stage = stage
        self._rank = local_rank
        if self.dirpath is None:
            self.dirpath = log_dir
        elif self.dirpath != log_dir:
            # now, and not when the report is written: that would be after hours of training
            try:
                os.makedirs(self.dirpath, exist_ok=True)
            except OSError as error:
                raise MisconfigurationException(
                    f"{type(self).__name__}(dirpath={self.dirpath!r}): the folder is not writable ({error}). Pass a "
                    "different folder."
                ) from error

    def summary(self) -> str:
        """Return the report as text, or ``""`` if there is nothing to report."""
        return ""

    def describe(self) -> None:
        """Append the report to a file if ``filename`` is set, else log it on rank 0; then call :meth:`teardown`."""
        text = self.summary()
        if text and self.filename is not None and self.dirpath is not None:
            os.makedirs(self.dirpath, exist_ok=True)
            with open(os.path.join(self.dirpath, self.file_name()), "a", encoding="utf-8") as file:
                file.write(text)
        elif text and self._rank in (None, 0):
            log.info(text)
        self.teardown(self._stage)

    def teardown(self, stage: str | None) -> None:  # noqa: B027, may be left as it is
        """Release the recorded data at the end of ``stage``.

        Args:
            stage: stage that was passed to :meth:`setup`; None if there was none.
        """

    @property
    def local_rank(self) -> int:
        """Rank that was passed to :meth:`setup`; 0 without a Trainer."""
        return 0 if self._rank is None else self._rank

    # -- for derived classes -------------------------------------------------------------------------------

    def file_name(self, action_name: str | None = None, extension: str = ".txt") -> str:
        """Return the name of an output file, made from the stage, ``filename``, the rank and the action.

        Args:
            action_name: action that the file is about; None: all actions.
            extension: extension with its dot.
        """
        parts = [self._stage, self.filename, None if self._rank is None else str(self._rank), action_name]
        name = "-".join(part for part in parts if part)
        # actions have names such as "[Callback]X{...}.on_fit_start": replace what some file systems refuse
        return (re.sub(r'[\\/:*?"<>|\s_]+', "_", name).strip("_") or "profile") + extension

    def report(self, parts: dict[str, str]) -> str:
        """Format a report: a headline, and a section for each action in `parts` (text by action).

        Returns:
            the report, which ends with a newline.
        """
        stage = f"{self._stage.upper()} " if self._stage is not None else ""
        rank = "" if self._rank is None else f" rank: {self._rank}"
        lines = [f"{stage}Profiler Report"]
        for action, text in parts.items():
            lines += [f"Profile stats for: {action}{rank}", text]
        return "\n".join(lines) + "\n"


class PassThroughProfiler(Profiler):
    """Profiler that records nothing; the default ``trainer.profiler``."""

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""


# -- by the clock -------------------------------------------------------------------------------------------


class SimpleProfiler(Profiler):
    """Profiler that sums wall-clock seconds for each action.

    On a GPU an action ends when its kernels are queued, not when they have run.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        extended: report the number of calls and the percentage of the total time too.

    Example::

        Trainer(profiler=SimpleProfiler(dirpath="profiles", filename="fit"))  # or profiler="simple"
    """

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, extended: bool = True
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        #: start of each running action, by `time.perf_counter`
        self.current_actions: dict[str, float] = {}
        #: seconds of each call, by action
        self.recorded_durations: dict[str, list[float]] = {}
        self.start_time = time.perf_counter()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "current_actions": {}}  # running actions stop in this process, not in the copy's

    def start(self, action_name: str) -> None:
        """Start the clock of an action.

        Args:
            action_name: name of the action in the report.

        Raises:
            ValueError: the action is running already.
        """
        if action_name in self.current_actions:
            raise ValueError(f"the action {action_name!r} is running already. Stop it first, or use another name")
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Record the seconds since :meth:`start` of an action.

        Args:
            action_name: name that was passed to :meth:`start`.

        Raises:
            ValueError: the action is not running.
        """
        now = time.perf_counter()
        if action_name not in self.current_actions:
            raise ValueError(f"the action {action_name!r} was never started. Call start({action_name!r}) first")
        start = self.current_actions.pop(action_name)
        self.recorded_durations.setdefault(action_name, []).append(now - start)

    def summary(self) -> str:
        """Return a table of the actions, sorted by total time, longest first."""
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
    """Profiler that runs Python's cProfile in every action; in nested actions only the innermost is profiled.

    cProfile slows Python down several times: the report shows where time goes, not how much a run takes.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        line_count_restriction: functions to list for each action: a number (int), or a fraction of all (float).
        dump_stats: write each action's profile to a ``.prof`` file in ``dirpath`` too, for tools that read ``pstats``.

    Example::

        Trainer(profiler=AdvancedProfiler(dirpath="profiles", filename="fit", line_count_restriction=20))
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
        #: profile of each action
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    def start(self, action_name: str) -> None:
        """Start profiling an action, and pause profiling the enclosing action."""
        # Python has one profiler at a time
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        if action_name not in self.profiled_actions:
            import cProfile  # late: few runs use it

            self.profiled_actions[action_name] = cProfile.Profile()
        self.profiled_actions[action_name].enable()

    def stop(self, action_name: str) -> None:
        """Stop profiling an action, and continue profiling the enclosing action.

        Raises:
            ValueError: the action is not running.
        """
        if action_name not in self._running:
            raise ValueError(f"the action {action_name!r} was never started. Call start({action_name!r}) first")
        self.profiled_actions[self._running[-1]].disable()
        self._running.remove(action_name)
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        """Return a table of Python functions for each action, sorted by cumulative time, longest first."""
        import pstats

        for action in self._running:
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
        """Discard all recorded profiles."""
        for action in self._running:
            self.profiled_actions[action].disable()
        self._running.clear()
        self.profiled_actions.clear()

    def __getstate__(self) -> dict[str, Any]:  # a cProfile.Profile cannot be pickled
        return {**self.__dict__, "profiled_actions": {}, "_running": []}
