"""What the time of a window goes to on one rank: fetching data, forward, backward, waiting for others, all else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PARTS = ("data", "forward", "backward", "waiting", "other")
"""The parts of a window's time, as `WindowTimes` has them."""


class WindowTimes(NamedTuple):
    """Seconds of one window on one rank, or of a typical one.

    Attributes:
        samples: of this rank in the window.
        data: waiting for batches.
        forward: ``training_step``, without what it waits for other ranks.
        backward: until the last gradients are on their way.
        waiting: in collectives, and for gradients of others.
        other: the update, hooks, and the loop itself.
    """

    samples: float
    data: float
    forward: float
    backward: float
    waiting: float
    other: float

    @property
    def busy(self) -> float:
        """All but waiting."""
        return self.data + self.forward + self.backward + self.other


def typical(windows: Sequence[WindowTimes]) -> WindowTimes:
    """The upper median of each part over some windows, at least one; `statistics` takes three times as long."""
    half = len(windows) // 2
    return WindowTimes(*[sorted(column)[half] for column in zip(*windows, strict=True)])
