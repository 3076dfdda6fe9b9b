"""ValidationTiming, which implements ``val_check_interval`` and ``check_val_every_n_epoch``."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from lockstep.config.run import RunConfig
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.progress import Progress
from lockstep.loop.session import Session


class ValidationTiming:
    """Schedule of a fit's validations, by ``val_check_interval`` and ``check_val_every_n_epoch``.

    Attributes:
        every: number of training batches between two validations; infinity: only at an epoch's end; None: by time, or
            not known yet.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.every: int | float | None = None
        self._at_end = True
        self._seconds = math.inf
        self._since = 0.0
        self._flag = 0

    def start(self) -> None:
        """Start the clock for time-based intervals, and register the flag by which ranks agree to validate."""
        interval = self._session.config.val_check_interval
        self._seconds = interval.total_seconds() if isinstance(interval, timedelta) else math.inf
        self._since = time.monotonic()
        self._flag = self._session.agreement.register("validate")

    def plan(self, batches: int | float) -> None:
        """Compute the interval between validations from ``batches``, the number of training batches in an epoch.

        Raises:
            MisconfigurationException: the interval does not fit this number.
        """
        interval = self._session.config.val_check_interval
        self.every = _interval(self._session.config, batches)
        self._at_end = self.every == math.inf or (isinstance(interval, float) and interval == 1.0)

    def in_epoch(self, epoch: int) -> bool:
        """Return True if ``check_val_every_n_epoch`` allows validations in this epoch."""
        every = self._session.config.check_val_every_n_epoch
        return self._session.enable_validation and (every is None or (epoch + 1) % every == 0)

    def due(self, progress: Progress, at_window_end: bool, batches: int = 1) -> bool:
        """Return True if a validation is due after one of the last ``batches`` training batches."""
        every = self.every
        if every is None:
            # rank 0's clock decides, and all ranks agree at the same boundary
            if not at_window_end:
                return False
            session, is_up = self._session, time.monotonic() - self._since >= self._seconds
            if session.world_size == 1:
                return is_up
            if is_up and session.is_global_zero:
                session.agreement.request(self._flag)
            return bool(session.agreement.is_up(self._flag))
        if self._at_end:
            return progress.last  # it may be true before the length that a loader has reported
        earlier = progress.earlier if self._session.config.check_val_every_n_epoch is None else 0
        counted = self._session.fit.resume.counted
        before, after = (earlier + counted(number) for number in (progress.batch - batches, progress.batch))
        if progress.validated:  # a window that is repeated may contain a validation
            before = max(before, earlier + progress.validated)
        return before // every < after // every  # a batch in our count may skip the one at which it is due

    def done(self) -> None:
        """Record that a validation has run: restart the time interval and clear the ranks' flag."""
        self._since = time.monotonic()
        self._session.agreement.lower(self._flag)


def _interval(config: RunConfig, batches: int | float) -> int | float | None:
    interval = config.val_check_interval
    if isinstance(interval, timedelta):
        return None
    if isinstance(interval, int):
        if interval > batches > 0 and config.check_val_every_n_epoch is not None and config.limit_val_batches:
            raise MisconfigurationException(
                f"`val_check_interval` ({interval}) must be less than or equal to the number of the training batches "
                f"({batches}), or validation would never run. Pass a smaller number, or check_val_every_n_epoch=None "
                "to count batches across epochs."
            )
        return interval
    if batches == math.inf:
        if interval != 1.0:
            raise MisconfigurationException(
                f"Trainer(val_check_interval={interval}) is a fraction of an epoch whose length is not known: pass "
                "an int (training batches), a time, or 1.0 for the epoch's end."
            )
        return math.inf
    return max(1, int(batches * interval))
