"""Timer: measures the duration of training, validation, test and prediction, and can limit the training time."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info
from lockstep.ground.types import RunningStage

if TYPE_CHECKING:
    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

_FORM = re.compile(r"(\d+):(\d\d):(\d\d):(\d\d)")


class Timer(Callback):
    """Callback that measures the duration of each stage, and stops training after a given time.

    Training that resumes from a checkpoint includes the time of its earlier attempts. On
    several ranks the clock of rank 0 decides, and all ranks stop together at the next step (some steps later
    if they are on several hosts); this takes no extra message. Nothing is stopped before
    ``Trainer(min_epochs=..., min_steps=...)`` are reached. If ``Trainer(max_time=...)`` is also given, the
    shorter of the two times counts.

    Args:
        duration: ``"DD:HH:MM:SS"`` (days, hours, minutes, seconds), a :class:`datetime.timedelta`, or a dict of
            its arguments; None only measures.
        interval: check the clock after each batch (``"step"``) or each epoch (``"epoch"``).
        verbose: report when the time is up.

    Attributes:
        stopping_reason_message: the reason why training was stopped; None if this callback did not stop it.

    Raises:
        MisconfigurationException: ``duration`` has another form, or ``interval`` another value.

    Example::

        timer = Timer(duration="00:12:00:00")  # or timedelta(hours=12), or {"hours": 12}
        trainer = Trainer(callbacks=[timer])
        trainer.fit(model)
        timer.time_elapsed("train")  # seconds
    """

    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        if interval not in ("step", "epoch"):
            raise MisconfigurationException(
                f'Timer(interval={interval!r}): the interval is unknown. Pass "step" or "epoch".'
            )
        self._duration = None if duration is None else _seconds(duration)
        self._interval = str(interval)
        self._verbose = verbose
        self._start: dict[RunningStage, float] = {}
        self._end: dict[RunningStage, float] = {}
        self._offset = 0.0  # training time of earlier attempts at the run
        self.stopping_reason_message: str | None = None

    # -- the public interface ------------------------------------------------------------------------------

    def start_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Return the start time of a stage in seconds of :func:`time.monotonic`; None if it has not started.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ValueError: ``stage`` is not the name of a stage.
        """
        return self._start.get(RunningStage(stage))

    def end_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Return the end time of a stage in seconds of :func:`time.monotonic`; None if it has not ended.

        Args:
            stage: as in :meth:`start_time`.

        Raises:
            ValueError: ``stage`` is not the name of a stage.
        """
        return self._end.get(RunningStage(stage))

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """Return the duration of a stage in seconds: up to its end, or up to now while it is running.

        For training, the time before the checkpoint from which the fit resumes is included.

        Args:
            stage: as in :meth:`start_time`.

        Raises:
            ValueError: ``stage`` is not the name of a stage.
        """
        stage = RunningStage(stage)
        offset = self._offset if stage is RunningStage.TRAINING else 0.0
        start = self._start.get(stage)
        if start is None:
            return offset
        return self._end.get(stage, time.monotonic()) - start + offset

    def time_remaining(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Return the remaining seconds of ``duration``, negative if it is exceeded; None if no ``duration`` is set.

        Args:
            stage: as in :meth:`start_time`.

        Raises:
            ValueError: ``stage`` is not the name of a stage.
        """
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    # -- the stages ----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Request the end of training if the training time before the checkpoint has already reached the time limit."""
        self.stopping_reason_message = None
        if RunningStage.TRAINING in self._start:  # from an earlier fit, which this one does not continue
            self._reset_training()
        self._check_limit(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_clock(RunningStage.TRAINING)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        if self._interval == "step":
            self._check_limit(trainer)

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        if self._interval == "step":
            self._check_limit(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._interval == "epoch":
            self._check_limit(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end[RunningStage.TRAINING] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_clock(RunningStage.VALIDATING)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end[RunningStage.VALIDATING] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_clock(RunningStage.TESTING)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end[RunningStage.TESTING] = time.monotonic()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_clock(RunningStage.PREDICTING)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end[RunningStage.PREDICTING] = time.monotonic()

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the elapsed seconds of each stage, under the keys that Lightning uses."""
        return {"time_elapsed": {stage.value: self.time_elapsed(stage) for stage in RunningStage}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the training time before the checkpoint, which counts toward ``duration``."""
        self._reset_training()
        self._offset = float(state_dict.get("time_elapsed", {}).get(RunningStage.TRAINING.value, 0.0))

    # -- the clock -----------------------------------------------------------------------------------------

    def _start_clock(self, stage: RunningStage) -> None:
        # validations of a fit start the clock of their stage many times
        self._end.pop(stage, None)
        self._start[stage] = time.monotonic()

    def _reset_training(self) -> None:
        self._start.pop(RunningStage.TRAINING, None)
        self._end.pop(RunningStage.TRAINING, None)
        self._offset = 0.0

    def _check_limit(self, trainer: Trainer) -> None:
        # Rank 0's request to stop reaches the others with the next agreement: no extra message in a step.
        if self._duration is None or not trainer.is_global_zero or self.stopping_reason_message is not None:
            return
        elapsed = self.time_elapsed()
        if elapsed >= self._duration:
            trainer.should_stop = True
            self.stopping_reason_message = f"duration={self._duration:g} s reached after {elapsed:.1f} s"
            if self._verbose:
                spent = timedelta(seconds=int(elapsed))
                rank_zero_info(f"Timer: training is stopped after {spent}, because its time limit is reached.")


def _seconds(duration: str | timedelta | dict[str, int]) -> float:
    try:
        if isinstance(duration, timedelta):
            length = duration
        elif isinstance(duration, dict):
            length = timedelta(**duration)
        else:
            match = _FORM.fullmatch(duration.strip())
            if match is None:
                raise ValueError
            days, hours, minutes, seconds = map(int, match.groups())
            length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except (TypeError, ValueError, AttributeError):
        raise MisconfigurationException(
            f'Timer(duration={duration!r}): the duration is not valid. Pass "DD:HH:MM:SS", a datetime.timedelta, '
            "or its arguments as a dict such "
            'as {"hours": 2}.'
        ) from None
    return length.total_seconds()
