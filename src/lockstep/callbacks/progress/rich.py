"""RichProgressBar: progress in colours, with the metrics on a line of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lockstep.callbacks.progress.base import DrawnProgressBar, Meter, number
from lockstep.ground.errors import MisconfigurationException, RankFailed, missing_extra

if TYPE_CHECKING:
    from rich.progress import TaskID

    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


@dataclass
class RichProgressBarTheme:
    """Styles of the parts of the bar, in the words of https://rich.readthedocs.io/en/stable/style.html."""

    description: str = ""  #: "Epoch 3/9", "Testing"
    progress_bar: str = "cyan"  #: what is done
    progress_bar_finished: str = "green"  #: all of it is done
    progress_bar_pulse: str = "cyan"  #: nobody knows how much there is to do
    batch_progress: str = ""  #: "40/100"
    time: str = "dim"  #: time spent, time left
    processing_speed: str = "dim"  #: "81.3it/s"
    metrics: str = "italic"  #: the line of metrics
    metrics_text_delimiter: str = "  "  #: between two of them
    metrics_format: str = "#.4g"  #: of a number among them


class RichProgressBar(DrawnProgressBar):
    """Draws bars with rich (extra ``rich``): training, and validation below it while that runs.

    The time and speed of training leave validation out. Nothing is drawn between batches, so there is no thread.

    Args:
        refresh_rate: most drawings per second; 0 draws nothing.
        leave: keep the finished bar of each epoch on the screen.
        theme: styles.
        console_kwargs: arguments for ``rich.console.Console``.

    Raises:
        ModuleNotFoundError: rich is not installed.
        MisconfigurationException: ``refresh_rate`` is negative.

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
        super().__init__(refresh_rate, interval=1 / refresh_rate if refresh_rate > 0 else math.inf)
        if find_spec("rich") is None:
            raise missing_extra("rich", "rich", "RichProgressBar")
        if refresh_rate < 0:
            raise MisconfigurationException(
                f"RichProgressBar(refresh_rate={refresh_rate}): drawings per second, 0 for none."
            )
        self.theme = theme or RichProgressBarTheme()
        self.progress: Any = None
        self._leave = leave
        self._console_kwargs = console_kwargs or {}
        self._train_task: Any = None
        self._eval_task: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: settings; a bar that is being drawn stays here."""
        return {**super().__getstate__(), "progress": None, "_train_task": None, "_eval_task": None}

    @property
    def refresh_rate(self) -> float:
        """Most drawings per second."""
        return self._refresh_rate

    def disable(self) -> None:
        super().disable()
        self._close()

    # -- rich's own objects --------------------------------------------------------------------------------

    @property
    def train_progress_bar_id(self) -> Any:
        """rich's id of the bar of training; None while there is none."""
        return self._train_task

    @property
    def val_progress_bar_id(self) -> Any:
        """rich's id of the bar of the evaluation that runs now; None outside of one."""
        return self._eval_task

    val_sanity_progress_bar_id = test_progress_bar_id = predict_progress_bar_id = val_progress_bar_id

    @property
    def train_progress_bar(self) -> Any:
        """rich's task of training: its description, total, what is completed."""
        return self._task(self._train_task)

    @property
    def val_progress_bar(self) -> Any:
        """rich's task of the evaluation that runs now."""
        return self._task(self._eval_task)

    val_sanity_check_bar = test_progress_bar = predict_progress_bar = val_progress_bar

    def _task(self, task_id: TaskID | None) -> Any:
        if self.progress is None or task_id is None:
            raise TypeError(f"{type(self).__name__}: there is no such bar now.")
        return next(task for task in self.progress.tasks if task.id == task_id)

    def refresh(self, hard: bool = False) -> None:
        """Draw now; ``hard`` is accepted for the signature."""
        if self.progress is not None:
            self.progress.refresh()

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """The columns of a bar, as for ``rich.progress.Progress``; override it to show others."""
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
                # as wide as there is room for, within reason
                table_column=Column(min_width=6, max_width=40),
            ),
            Batches(theme.batch_progress),
            Times(theme.time),
            Speed(theme.processing_speed),
        ]

    def _metrics_text(self, metrics: dict[str, Any]) -> tuple[str, str]:
        """The line of metrics, and its style."""
        shown = (f"{name}={number(value, self.theme.metrics_format)}" for name, value in metrics.items())
        return self.theme.metrics_text_delimiter.join(shown), self.theme.metrics

    # -- training ------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the bar anew."""
        if self.is_disabled:
            return
        if self._leave and self._train_task is not None:
            self._close()
        self._begin_drawing()
        self._start(trainer)
        if self._train_task is not None:
            self.progress.remove_task(self._train_task)
        self._train_meter.begin(self.total_train_batches)
        # as wide as "Validation", which comes and goes below
        name = self.epoch_description.ljust(len(self.validation_description))
        self._train_task = self._add(name, self._train_meter)

    def _draw_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._train_task is not None:  # a bar that is enabled in an epoch begins with the next one
            self.progress.metrics = self.get_metrics(trainer, pl_module)
            self.progress.update(self._train_task, completed=self._train_meter.done, refresh=True)

    # -- evaluation ----------------------------------------------------------------------------------------

    def _begin_loader(self, trainer: Trainer, name: str, total: int | float) -> None:
        self._start(trainer)
        if self._eval_task is not None and trainer.state.fn == "fit":
            self.progress.remove_task(self._eval_task)
        # a bar that stays on the screen keeps its time
        self._eval_meter.pause()
        self._eval_meter = Meter(interval=self._eval_meter.interval)
        self._eval_meter.begin(total)
        self._eval_task = self._add(name, self._eval_meter)

    def _draw_evaluation(self, done: int) -> None:
        if self._eval_task is not None:
            self.progress.update(self._eval_task, completed=done, refresh=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In a fit, take the bar of validation away and show its metrics."""
        self.reset_dataloader_idx_tracker()
        if self.progress is None or trainer.state.fn != "fit":
            self._close()
            return
        if self._eval_task is not None:
            self.progress.remove_task(self._eval_task)
            self._eval_task = None
        self._train_meter.resume()
        self._draw_training(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, RankFailed) and self.progress is not None:
            self.progress.leave()  # the traceback of that rank stands where the bars would be drawn a last time
        super().on_exception(trainer, pl_module, exception)

    # -- the screen ----------------------------------------------------------------------------------------

    def print(self, *args: object, sep: str = " ", end: str = "\n", **kwargs: Any) -> None:
        """Print above the bars."""
        if self.progress is None or kwargs.get("file") is not None:
            print(*args, sep=sep, end=end, **kwargs)
        else:
            # text is printed as it is: no markup, no colours for numbers, no wrapping
            text = sep.join(map(str, args))
            self.progress.console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)

    def _start(self, trainer: Trainer) -> None:
        if self.progress is None:
            from lockstep.callbacks.progress.rich_columns import Bars

            self.progress = Bars(self.configure_columns(trainer), self._metrics_text, self._console_kwargs)
            self.progress.start()

    def _close(self) -> None:
        self.reset_dataloader_idx_tracker()
        self._draws = False
        if self.progress is not None:
            self.progress.stop()
        self.progress = self._train_task = self._eval_task = None

    def _add(self, description: str, meter: Meter) -> Any:
        total = meter.total if math.isfinite(meter.total) else None
        return self.progress.add_task(description, total=total, meter=meter)
