"""SimpleProfiler: how often and how long each action ran."""

from __future__ import annotations

import math
import os
import time

from lockstep.profilers.base import Profiler


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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "-" * (sum(widths) + 3 * len(widths) + 1)
    text = [line]
    for number, row in enumerate(rows):
        text.append("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0 or row[0] == "Total":
            text.append(line)
    return "\n".join([*text, line, ""])
