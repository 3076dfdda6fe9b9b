"""The time of a window on one rank: fetching data, forward, backward, waiting for others, everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PARTS = ("data", "forward", "backward", "waiting", "other")
"""The parts of a window's time, as `WindowTimes` has them."""


class WindowTimes(NamedTuple):
    """Seconds of one window on one rank, or of a typical one.

    Attributes:
        samples: number of this rank's samples in the window.
        data: waiting for batches.
        forward: ``training_step``, without its waits for other ranks.
        backward: until the last gradients are being sent.
        waiting: in collectives, and for gradients from other ranks.
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
        """The seconds without waiting."""
        return self.data + self.forward + self.backward + self.other


def typical(windows: Sequence[WindowTimes]) -> WindowTimes:
    """Return the upper median of each part over windows, at least one; `statistics` would take three times as long."""
    half = len(windows) // 2
    return WindowTimes(*[sorted(column)[half] for column in zip(*windows, strict=True)])
