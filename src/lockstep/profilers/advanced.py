"""AdvancedProfiler: the Python functions that each action spends its time in, by cProfile."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from typing import Any

from lockstep.profilers.base import Profiler


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
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

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
