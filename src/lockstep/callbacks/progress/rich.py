"""RichProgressBar: coloured progress bars, with the metrics on a separate line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lockstep.callbacks.progress.base import DrawnProgressBar, Meter, number
from lockstep.ground.errors import RankFailed, missing_extra

if TYPE_CHECKING:
    from rich.progress import TaskID

    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


@dataclass
class RichProgressBarTheme:
    """Styles of the parts of the bar; see https://rich.readthedocs.io/en/stable/style.html for the syntax.

    Example::

        theme = RichProgressBarTheme(progress_bar="magenta", metrics_format=".3f")
        Trainer(callbacks=RichProgressBar(theme=theme))
    """

    description: str = ""  #: "Epoch 3/9", "Testing"
    progress_bar: str = "cyan"  #: the completed part
    progress_bar_finished: str = "green"  #: the bar when it is complete
    progress_bar_pulse: str = "cyan"  #: the bar if the total is unknown
    batch_progress: str = ""  #: "40/100"
    time: str = "dim"  #: time spent, time left
    processing_speed: str = "dim"  #: "81.3it/s"
    metrics: str = "italic"  #: the line of metrics
    metrics_text_delimiter: str = "  "  #: between two metrics
    metrics_format: str = "#.4g"  #: format of numbers


class RichProgressBar(DrawnProgressBar):
    """Progress bar drawn with rich (extra ``rich``): training, and validation below it while it runs.

    The time and speed of training exclude validation. Nothing is drawn between batches, so no thread is needed.

    Args:
        refresh_rate: maximum number of drawings per second; 0 disables drawing.
        leave: keep the finished bar of each epoch on the screen.
        theme: styles of the parts of the bar.
        console_kwargs: arguments for ``rich.console.Console``.

    Raises:
        ModuleNotFoundError: rich is not installed.

    Example::

        Trainer(callbacks=RichProgressBar(leave=True, theme=RichProgressBarTheme(progress_bar="magenta")))
    """

    def __init__(
        self,
        refresh_rate: float = 10,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(refresh_rate, leave, interval=1 / refresh_rate if refresh_rate > 0 else math.inf)
        if find_spec("rich") is None:
            raise missing_extra("rich", "rich", "RichProgressBar")
        self.theme = theme or RichProgressBarTheme()
        self._console_kwargs = console_kwargs or {}
        self.progress: Any = None
        self.train_progress_bar_id: Any = None
        """rich's id of the training bar; None while there is no training bar."""
        self.val_progress_bar_id: Any = None
        """rich's id of the bar for the current evaluation; None outside an evaluation."""

    _drawn = ("progress", "train_progress_bar_id", "val_progress_bar_id")
    val_sanity_progress_bar_id = test_progress_bar_id = predict_progress_bar_id = property(
        lambda self: self.val_progress_bar_id
    )

    @property
    def train_progress_bar(self) -> Any:
        """Task object of rich for the training bar, with description, total and completed batches.

        Raises:
            TypeError: the bar is not on the screen: it exists only while its loop runs.
        """
        return self._task(self.train_progress_bar_id)

    @property
    def val_progress_bar(self) -> Any:
        """Task object of rich for the bar of the current evaluation.

        Raises:
            TypeError: the bar is not on the screen: it exists only while its loop runs.
        """
        return self._task(self.val_progress_bar_id)

    val_sanity_check_bar = test_progress_bar = predict_progress_bar = val_progress_bar

    def _task(self, task_id: TaskID | None) -> Any:
        if self.progress is None or task_id is None:
            raise TypeError(
                f"{type(self).__name__}: the bar exists only while its loop runs. Use it in hooks of that loop."
            )
        return next(task for task in self.progress.tasks if task.id == task_id)

    def disable(self) -> None:
        super().disable()
        self._close()

    def refresh(self, hard: bool = False) -> None:
        """Draw immediately; ``hard`` is accepted for compatibility and ignored."""
        if self.progress is not None:
            self.progress.refresh()

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return the columns for ``rich.progress.Progress``; override this method to show different columns.

        Args:
            trainer: the Trainer that runs.

        Example::

            def configure_columns(self, trainer):
                return [*super().configure_columns(trainer), rich.progress.TimeElapsedColumn()]
        """
        from rich.progress import BarColumn, TextColumn
        from rich.table import Column

        from lockstep.callbacks.progress.rich_columns import Batches, Speed, Times

        theme = self.theme
        return [
            TextColumn("{task.description}", style=theme.description or "none", markup=False),
            BarColumn(
                bar_width=None,
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
                # as wide as possible, within reasonable limits
                table_column=Column(min_width=6, max_width=40),
            ),
            Batches(theme.batch_progress),
            Times(theme.time),
            Speed(theme.processing_speed),
        ]

    def _metrics_text(self, metrics: dict[str, Any]) -> tuple[str, str]:
        """Return (text with all metrics, name of its style)."""
        shown = (f"{name}={number(value, self.theme.metrics_format)}" for name, value in metrics.items())
        return self.theme.metrics_text_delimiter.join(shown), self.theme.metrics

    # -- drawing -------------------------------------------------------------------------------------------

    def _begin_bar(self, trainer: Trainer, meter: Meter, name: str) -> None:
        if self.progress is None:
            from lockstep.callbacks.progress.rich_columns import Bars

            self.progress = Bars(self.configure_columns(trainer), self._metrics_text, self._console_kwargs)
            self.progress.start()
        is_training = meter is self._train_meter
        before = self.train_progress_bar_id if is_training else self.val_progress_bar_id
        if before is not None and trainer.state.fn == "fit":  # if several loaders are tested, all bars stay
            self.progress.remove_task(before)
        total = meter.total if math.isfinite(meter.total) else None
        if is_training:  # as wide as "Validation", which appears below it
            name = name.ljust(len(self.validation_description))
            self.train_progress_bar_id = self.progress.add_task(name, total=total, meter=meter)
        else:
            self.val_progress_bar_id = self.progress.add_task(name, total=total, meter=meter)

    def _paint(self, meter: Meter, metrics: dict[str, Any] | None = None) -> None:
        task = self.train_progress_bar_id if meter is self._train_meter else self.val_progress_bar_id
        if task is not None:  # a bar that is enabled within an epoch starts with the next one
            if metrics is not None:
                self.progress.metrics = metrics
            self.progress.update(task, completed=meter.done, refresh=True)

    def _end_evaluation(self) -> None:
        super()._end_evaluation()
        if self.trainer.state.fn != "fit":
            self._close()
        elif self.val_progress_bar_id is not None:
            self.progress.remove_task(self.val_progress_bar_id)
            self.val_progress_bar_id = None

    def _close(self) -> None:
        self.reset_dataloader_idx_tracker()
        self._draws = False
        if self.progress is not None:
            self.progress.stop()
        self.progress = self.train_progress_bar_id = self.val_progress_bar_id = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, RankFailed) and self.progress is not None:
            self.progress.leave()  # that rank's traceback is where the bars would be drawn for the last time
        super().on_exception(trainer, pl_module, exception)

    def print(self, *args: object, sep: str = " ", end: str = "\n", **kwargs: Any) -> None:
        """Print text above the bars.

        Arguments are those of Python's ``print``; text for a ``file`` is written to that file directly.
        """
        if self.progress is None or kwargs.get("file") is not None:
            print(*args, sep=sep, end=end, **kwargs)
        else:
            # text is printed verbatim: no markup, no colours for numbers, no wrapping
            text = sep.join(map(str, args))
            self.progress.console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)
