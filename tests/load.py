"""What a time limit of a test is on a busy machine."""

from __future__ import annotations

import os


def busy() -> float:
    """Processes that want a processor, for each that there is; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def at_most(seconds: float) -> float:
    """So many seconds of a quiet machine, as long as they take on a busy one.

    Load is a mean over a minute: half of what it says is granted, beside the whole of a machine with two processes for
    each processor.
    """
    return seconds * max(1.0, busy() / 2)
