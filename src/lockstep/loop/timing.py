"""When a fit validates: after so many training batches, at the end of an epoch, or by the clock."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.progress import Progress


class ValidationTiming:
    """The flags ``val_check_interval`` and ``check_val_every_n_epoch`` of one fit.

    Attributes:
        every: training batches between two validations; infinite: at the epoch's end; None: by time, or not planned.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.every: int | float | None = None
        self._seconds = math.inf
        self._since = 0.0
        self._flag = 0

    def start(self) -> None:
        """The fit begins; the ranks can agree on things."""
        interval = self._trainer.config.val_check_interval
        self._seconds = interval.total_seconds() if isinstance(interval, timedelta) else math.inf
        self._since = time.monotonic()
        self._flag = self._trainer.agreement.register("validate")

    def plan(self, batches: int | float) -> None:
        """Take in how many training batches an epoch has.

        Raises:
            MisconfigurationException: an interval that does not go with this number.
        """
        self.every = _interval(self._trainer.config, batches)

    def in_epoch(self, epoch: int) -> bool:
        """Whether this epoch is validated at all."""
        every = self._trainer.config.check_val_every_n_epoch
        return self._trainer.enable_validation and (every is None or (epoch + 1) % every == 0)

    def due(self, progress: Progress, at_window_end: bool) -> bool:
        """Whether the interval is over after a training batch."""
        every = self.every
        if every is None:
            return at_window_end and self._time_is_up()
        count = progress.total_batches if self._trainer.config.check_val_every_n_epoch is None else progress.batch
        return progress.last if every == math.inf else count % every == 0

    def _time_is_up(self) -> bool:
        """Rank 0's clock decides, and all ranks learn of it at the same boundary."""
        trainer, up = self._trainer, time.monotonic() - self._since >= self._seconds
        if trainer.world_size == 1:
            return up
        if up and trainer.is_global_zero:
            trainer.agreement.request(self._flag)
        return bool(trainer.agreement.is_up(self._flag))

    def done(self) -> None:
        """A validation has ended; the clock begins anew."""
        self._since = time.monotonic()
        self._trainer.agreement.lower(self._flag)


def _interval(config: Any, batches: int | float) -> int | float | None:
    interval = config.val_check_interval
    if isinstance(interval, timedelta):
        return None
    if isinstance(interval, int):
        if interval > batches and config.check_val_every_n_epoch is not None and config.limit_val_batches:
            raise MisconfigurationException(
                f"Trainer(val_check_interval={interval}): an epoch has {batches} training batches, so validation "
                "would never run; give a smaller number, or check_val_every_n_epoch=None to count across epochs."
            )
        return interval
    if batches == math.inf:
        if interval != 1.0:
            raise MisconfigurationException(
                f"Trainer(val_check_interval={interval}) is a fraction of an epoch whose length is not known: give "
                "an int (training batches), a time, or 1.0 for the epoch's end."
            )
        return math.inf
    return max(1, int(batches * interval))
