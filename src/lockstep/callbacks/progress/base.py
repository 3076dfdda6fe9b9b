"""Base classes of progress bars, and the plain bar, which writes lines."""

from __future__ import annotations

import contextlib
import math
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

# -- meters --------------------------------------------------------------------------------------------------


class Meter:
    """Counter of a loop's finished batches and elapsed seconds. It also decides when a bar is redrawn.

    Args:
        every: draw only at every n-th batch (and at the last).
        interval: minimum number of seconds between two drawings.
    """

    def __init__(self, every: int = 1, interval: float = 0.1) -> None:
        self.every = max(1, every)
        self.interval = interval
        self.begin(math.inf)

    def begin(self, total: int | float) -> None:
        """Reset the meter for a new loop with ``total`` batches (inf if unknown)."""
        self.total = total
        self.done = 0
        self._first: int | None = None
        self._started = monotonic()
        self._paused_at: float | None = None
        self._next = self._started

    def due(self, done: int) -> bool:
        """Return True if the bar should be redrawn after ``done`` batches.

        The method is called in every step, so it must be fast.
        """
        if self._first is None:
            # a resumed epoch starts in its middle: the skipped batches were not done in this time
            self._first = done - 1
        if done != self.total and (done % self.every or monotonic() < self._next):
            return False
        self._next = monotonic() + self.interval
        self.done = done
        return True

    def pause(self) -> None:
        """Stop counting time until :meth:`resume`, for example during a validation within an epoch."""
        self._paused_at = monotonic()

    def resume(self) -> None:
        """Continue to count time after :meth:`pause`."""
        if self._paused_at is not None:
            self._started += monotonic() - self._paused_at
            self._paused_at = None

    @property
    def first(self) -> int:
        """Number of batches finished before the loop started; greater than 0 in a resumed epoch."""
        return self._first or 0

    @property
    def seconds(self) -> float:
        """Seconds since the start of the loop, without the times between :meth:`pause` and :meth:`resume`."""
        return (self._paused_at or monotonic()) - self._started

    @property
    def rate(self) -> float:
        """Batches per second so far; 0 before the first batch."""
        return (self.done - self.first) / max(self.seconds, 1e-9)

    @property
    def remaining(self) -> float:
        """Estimated seconds until the end of the loop; inf if unknown."""
        return (self.total - self.done) / self.rate if self.rate else math.inf


def clock(seconds: float) -> str:
    """Format seconds as ``minutes:seconds``, or with hours if needed.

    >>> clock(7.9), clock(754), clock(3_700_000), clock(float("inf"))
    ('0:07', '12:34', '1027:46:40', '-:--')
    """
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def number(value: object, spec: str = "#.4g") -> str:
    """Format a metric as text with its trailing zeros, so that text to the right does not move.

    >>> number(0.5), number(1250.0), number(3), number("v1")
    ('0.5000', '1250', '3', 'v1')
    """
    return format(value, spec).rstrip(".") if isinstance(value, float) else str(value)


def speed(rate: float) -> str:
    """Format a rate as batches per second, or as seconds per batch if the rate is below 0.1.

    >>> speed(0.02), speed(3.14159), speed(1234.5)
    ('50.0s/it', '3.14it/s', '1234it/s')
    """
    if 0 < rate < 0.1:
        return f"{1 / rate:.1f}s/it"
    return f"{rate:.0f}it/s" if rate >= 100 else f"{rate:.2f}it/s"


# -- the base class ------------------------------------------------------------------------------------------


class ProgressBar(Callback):
    """Base class of progress bars. It computes the totals, labels and metrics that a subclass draws.

    Only rank 0 draws: the other ranks are disabled in :meth:`setup`, so a subclass that overrides it must call
    ``super()``.

    Example::

        class Percent(ProgressBar):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if self.is_enabled:
                    print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %", end="\\r")
    """

    # class attributes, for subclasses that do not call `super().__init__()`
    _trainer: Trainer | None = None
    _enabled = True
    _current_eval_dataloader_idx: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Store the trainer; disable the bar on ranks other than 0."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without the Trainer, as they are sent to another process."""
        return {**super().__getstate__(), "_trainer": None}

    @property
    def trainer(self) -> Trainer:
        """The Trainer whose progress is drawn; raises TypeError before :meth:`setup`."""
        if self._trainer is None:
            raise TypeError(
                f"{type(self).__name__}.trainer: the bar is not attached to a running Trainer. Pass the bar to "
                "Trainer(callbacks=...)."
            )
        return self._trainer

    # -- on and off ----------------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """True if the bar is drawn."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """True if the bar is not drawn."""
        return not self.is_enabled

    def enable(self) -> None:
        """Enable drawing."""
        self._enabled = True

    def disable(self) -> None:
        """Disable drawing."""
        self._enabled = False

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print, as the builtin ``print`` does, without disturbing the bar. ``trainer.print`` calls this method."""
        print(*args, **kwargs)

    # -- content of the bar --------------------------------------------------------------------------------

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the metrics shown next to the bar: values logged with ``prog_bar=True``, and the loggers' version.

        Called only when the bar is drawn, because it copies values from the device. Override it to show
        other values::

            def get_metrics(self, trainer, pl_module):
                items = super().get_metrics(trainer, pl_module)
                items.pop("v_num", None)
                return items

        Args:
            trainer: the Trainer that runs.
            pl_module: module of the run.
        """
        metrics = trainer.progress_bar_metrics
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        # last, because a narrow terminal cuts off the end
        return {**values, **{name: v for name, v in get_standard_metrics(trainer).items() if name not in values}}

    @property
    def sanity_check_description(self) -> str:
        """Label of the bar for the sanity check."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """Label of the training bar before its first epoch."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """Label of the bar for validation."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """Label of the bar for testing."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """Label of the bar for prediction."""
        return "Predicting"

    @property
    def epoch_description(self) -> str:
        """Label of the bar in the current epoch: ``Epoch 3/9``, where 9 is the number of the last epoch, if known."""
        last = self.trainer.max_epochs
        return f"Epoch {self.trainer.current_epoch}" + (f"/{last - 1}" if last is not None and last > 0 else "")

    @property
    def total_train_batches(self) -> int | float:
        """Number of batches in this training epoch; inf if unknown."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
            return min(trainer.num_training_batches, left)
        return trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """Number of batches in all validation loaders; 0 in an epoch without validation."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every and (trainer.current_epoch + 1) % every):
            return 0
        return sum(_passes(trainer))

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Number of batches in the loader that the current evaluation is reading."""
        assert self._current_eval_dataloader_idx is not None, "asked for a loader's total outside its batches"
        return _passes(self.trainer)[self._current_eval_dataloader_idx]

    total_test_batches_current_dataloader = total_val_batches_current_dataloader
    total_predict_batches_current_dataloader = total_val_batches_current_dataloader

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return True if ``dataloader_idx`` differs from that of the previous call."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Clear the loader index that :meth:`has_dataloader_changed` compares with, at the end of an evaluation."""
        self._current_eval_dataloader_idx = None


class PlainProgressBar(ProgressBar):
    """Progress bar that writes a line to stderr at the end of an epoch, at most one line per ``interval``.

    It is the default of a Trainer if stdout is not a terminal. The last epoch always gets its line, so a short
    run writes exactly one::

        Epoch 9/9: step 1800, 0:03, train_loss=0.04127, val_acc=0.9778

    It does nothing between the ends of epochs, and costs nothing there.

    Args:
        interval: minimum number of seconds between two lines; 0 writes one for each epoch.
    """

    def __init__(self, interval: float = 30.0) -> None:
        super().__init__()
        self.interval = interval
        self._epoch = ""
        self._written: str | None = None
        self._epoch_began = self._next = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the minimum interval before the first line."""
        self._written, self._epoch = None, self.epoch_description  # a fit may resume within an epoch
        self._epoch_began = monotonic()
        self._next = self._epoch_began + self.interval

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the start time of the epoch."""
        self._epoch = self.epoch_description
        self._epoch_began = monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a line if the minimum interval since the previous line has passed."""
        if monotonic() >= self._next:
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the line for the last epoch, unless that line has been written."""
        if self._written != self._epoch:
            self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_disabled:
            return
        self._written = self._epoch
        self._next = monotonic() + self.interval
        shown = [f"step {trainer.global_step}", clock(monotonic() - self._epoch_began)]
        shown += [f"{name}={number(value)}" for name, value in self.get_metrics(trainer, pl_module).items()]
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the disk is full
            print(f"{self._epoch}: {', '.join(shown)}", file=sys.stderr, flush=True)


class DrawnProgressBar(ProgressBar):
    """Base class of progress bars that are redrawn: one for training, and one for the current evaluation.

    The time and speed of training exclude validation. Nothing is drawn between batches, so no thread is needed.

    Args:
        refresh_rate: 0 disables drawing.
        leave: keep the finished bar of each epoch on the screen.
        every: draw only at every n-th batch.
        interval: minimum number of seconds between two drawings.
    """

    def __init__(self, refresh_rate: float, leave: bool, every: int = 1, interval: float = 0.1) -> None:
        super().__init__()
        self._refresh_rate = refresh_rate
        self._leave = leave
        self._draws = False  # True if the current bars are drawn; decided at the start of a loop
        self._train_meter = Meter(every, interval)
        self._eval_meter = Meter(every, interval)

    @property
    def is_enabled(self) -> bool:
        return self._enabled and self._refresh_rate > 0

    def disable(self) -> None:
        """Disable drawing. Bars that are on the screen stay there."""
        super().disable()
        self._draws = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without the bars on the screen, as they are sent to another process."""
        return {**super().__getstate__(), **dict.fromkeys(self._drawn)}

    @property
    def refresh_rate(self) -> float:
        """Value of the argument ``refresh_rate``."""
        return self._refresh_rate

    # -- methods of subclasses; each bar belongs to a meter, of training or of the current evaluation

    _drawn: tuple[str, ...] = ()
    """Names of the attributes with bars; they are None while no bar is on the screen."""

    def _begin_drawing(self) -> None:
        self._draws = self.is_enabled

    def _open(self, what: str) -> None:
        """Prepare the bars for the loop ``what``, even if drawing is disabled.

        Args:
            what: ``"train"``, ``"sanity_check"``, ``"validation"``, ``"test"`` or ``"predict"``.
        """

    def _begin_bar(self, trainer: Trainer, meter: Meter, name: str) -> None:
        raise NotImplementedError

    def _paint(self, meter: Meter, metrics: dict[str, Any] | None = None) -> None:
        raise NotImplementedError

    def _end_evaluation(self) -> None:
        self.reset_dataloader_idx_tracker()

    def _close(self) -> None:
        """Finish drawing; keep the bars on the screen, and release the terminal."""
        raise NotImplementedError

    # -- training ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._train_meter.begin(math.inf)
        self._open("train")
        self._begin_drawing()
        if trainer.fit_loop.progress.batch:  # it resumes within an epoch, whose start calls no hook
            self._begin_epoch(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the training bar for the new epoch."""
        if self._draws and self._leave and self._train_meter.done:
            self._close()
            self._open("train")
        self._begin_drawing()
        self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: Trainer) -> None:
        if self._draws:
            self._train_meter.begin(self.total_train_batches)
            self._begin_bar(trainer, self._train_meter, self.epoch_description)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        self._on_any_batch_end(trainer, pl_module, batch_idx)

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        if self._draws and self._train_meter.due(batch_idx + 1):
            self._paint(self._train_meter, self.get_metrics(trainer, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._draws:  # show values logged at the end of the epoch
            self._paint(self._train_meter, self.get_metrics(trainer, pl_module))

    # -- evaluation ----------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(_evaluation(trainer))
        self._begin_drawing()

    on_test_start = on_predict_start = on_sanity_check_start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._train_meter.pause()
            self._open(_evaluation(trainer))
            self._begin_drawing()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._draws and self.has_dataloader_changed(dataloader_idx):
            totals, name = _passes(trainer), getattr(self, f"{_evaluation(trainer)}_description")
            self._eval_meter.pause()  # a bar that stays on the screen keeps its time
            self._eval_meter = Meter(self._eval_meter.every, self._eval_meter.interval)
            self._eval_meter.begin(totals[dataloader_idx])
            of_several = f" DataLoader {dataloader_idx}" if len(totals) > 1 else ""
            self._begin_bar(trainer, self._eval_meter, name + of_several)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._draws and self._eval_meter.due(batch_idx + 1):
            self._paint(self._eval_meter)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_evaluation()

    on_test_end = on_predict_end = on_sanity_check_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In a fit, remove the validation bar, and show the new metrics next to the training bar."""
        if trainer.sanity_checking:
            return
        self._end_evaluation()
        self._train_meter.resume()
        if self._draws and trainer.state.fn == "fit":
            self._paint(self._train_meter, self.get_metrics(trainer, pl_module))

    # -- the end -------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()


def _evaluation(trainer: Trainer) -> str:
    """Return the name of the current evaluation: ``"sanity_check"``, ``"validation"``, ``"test"`` or ``"predict"``."""
    if trainer.sanity_checking:
        return "sanity_check"
    return {"test": "test", "predict": "predict"}.get(str(trainer.state.fn), "validation")


def _passes(trainer: Trainer) -> list[int | float]:
    """Return a list with each loader's number of batches, for the current evaluation or the fit's validation.

    There is a single number if the loaders are combined into one.
    """
    by_call = {"validate": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}
    loop = by_call.get(str(trainer.state.fn), trainer.fit_loop.validation)
    if trainer.sanity_checking:
        return [min(trainer.num_sanity_val_steps, each) for each in loop.num_batches]
    return loop.num_batches


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a stream is a terminal; False if it is None or closed."""
    return stream is not None and not stream.closed and bool(stream.isatty())


def in_notebook() -> bool:
    """Return True if this process runs in a Jupyter notebook, which can show bars without a terminal."""
    return "ipykernel" in sys.modules


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return ``{"v_num": version}`` with the loggers' versions, or an empty dict if there are none.

    Of a version that is text, the last four characters are used.

    Args:
        trainer: the Trainer whose loggers have the versions.
    """
    versions = list(dict.fromkeys(logger.version for logger in trainer.loggers if logger.version not in (None, "")))
    if not versions:
        return {}
    version = versions[0] if len(versions) == 1 else "_".join(map(str, versions))
    return {"v_num": version[-4:] if isinstance(version, str) else version}
