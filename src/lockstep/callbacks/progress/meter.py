"""How far a loop over batches has come, how fast it goes, and when it is worth drawing again."""

from __future__ import annotations

import math
from time import monotonic
from typing import Any


class Meter:
    """Counts the batches of one loop and the seconds spent on them.

    Args:
        every: draw at every n-th batch only (and at the last).
        interval: least number of seconds between two drawings.
    """

    def __init__(self, every: int = 1, interval: float = 0.1) -> None:
        self.every = max(1, every)
        self.interval = interval
        self.begin(math.inf)

    def begin(self, total: int | float) -> None:
        """A new loop of ``total`` batches (inf if that is not known) starts now."""
        self.total = total
        self.done = 0
        self._first: int | None = None
        self._started = monotonic()
        self._paused_at: float | None = None
        self._next = self._started

    def due(self, done: int) -> bool:
        """Whether to draw now that ``done`` batches are behind us; called in each step, so it is brief."""
        if self._first is None:
            # a resumed epoch begins in its middle: what it skipped was not done in this time
            self._first = done - 1
        if done != self.total and (done % self.every or monotonic() < self._next):
            return False
        self._next = monotonic() + self.interval
        self.done = done
        return True

    def pause(self) -> None:
        """Time that passes from now on is not this loop's (validation in the middle of an epoch)."""
        self._paused_at = monotonic()

    def resume(self) -> float:
        """Count time again; returns the seconds that were left out."""
        if self._paused_at is None:
            return 0.0
        away = monotonic() - self._paused_at
        self._started += away
        self._paused_at = None
        return away

    @property
    def first(self) -> int:
        """Batches that were behind us when this loop began: not 0 in a resumed epoch."""
        return self._first or 0

    @property
    def seconds(self) -> float:
        """Seconds spent so far."""
        return (self._paused_at or monotonic()) - self._started

    @property
    def rate(self) -> float:
        """Batches per second so far; 0 before the first one."""
        return (self.done - self.first) / max(self.seconds, 1e-9)

    @property
    def remaining(self) -> float:
        """Seconds to the end at this rate; inf if there is no telling."""
        return (self.total - self.done) / self.rate if self.rate else math.inf


def clock(seconds: float) -> str:
    """Seconds as people write them.

    >>> clock(7.9), clock(754), clock(3_700_000), clock(float("inf"))
    ('0:07', '12:34', '1027:46:40', '-:--')
    """
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def number(value: Any, spec: str = "#.4g") -> str:
    """A metric; a float keeps its digits, zeros too, so that what stands beside it does not move.

    >>> number(0.5), number(1250.0), number(3), number("v1")
    ('0.5000', '1250', '3', 'v1')
    """
    return format(value, spec).rstrip(".") if isinstance(value, float) else str(value)


def speed(rate: float) -> str:
    """Batches per second as people write them.

    >>> speed(0.02), speed(3.14159), speed(1234.5)
    ('50.0s/it', '3.14it/s', '1234it/s')
    """
    if 0 < rate < 0.1:
        return f"{1 / rate:.1f}s/it"
    return f"{rate:.0f}it/s" if rate >= 100 else f"{rate:.2f}it/s"
