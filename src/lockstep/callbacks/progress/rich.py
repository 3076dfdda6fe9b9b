"""RichProgressBar: progress in colours, with the metrics on a line of their own."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lockstep.callbacks.progress.base import Meter, ProgressBar
from lockstep.callbacks.progress.theme import RichProgressBarTheme
from lockstep.ground.errors import MisconfigurationException, missing_extra

if TYPE_CHECKING:
    from rich.progress import TaskID

    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class RichProgressBar(ProgressBar):
    """Draws bars with rich (extra ``rich``): training, and validation below it while that runs.

    The time and speed of training leave validation out. Nothing is drawn between batches, so there is no
    thread.

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
        super().__init__()
        if find_spec("rich") is None:
            raise missing_extra("rich", "rich", "RichProgressBar")
        if refresh_rate < 0:
            raise MisconfigurationException(
                f"RichProgressBar(refresh_rate={refresh_rate}): drawings per second, 0 for none."
            )
        self.theme = theme or RichProgressBarTheme()
        self.progress: Any = None
        self._refresh_rate = refresh_rate
        self._leave = leave
        self._console_kwargs = console_kwargs or {}
        self._interval = 1 / refresh_rate if refresh_rate else math.inf
        self._train_meter = Meter(interval=self._interval)
        self._eval_meter = Meter(interval=self._interval)
        self._train_task: Any = None
        self._eval_task: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: settings; a bar that is being drawn stays here."""
        return {**super().__getstate__(), "progress": None, "_train_task": None, "_eval_task": None}

    @property
    def refresh_rate(self) -> float:
        """Most drawings per second."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether anything is drawn."""
        return self._enabled and self._refresh_rate > 0

    def disable(self) -> None:
        """Draw nothing from now on; what was drawn stays."""
        super().disable()
        self._stop()

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

    def _task(self, number: TaskID | None) -> Any:
        if self.progress is None or number is None:
            raise TypeError(f"{type(self).__name__}: there is no such bar now.")
        return next(task for task in self.progress.tasks if task.id == number)

    def refresh(self, hard: bool = False) -> None:
        """Draw now; ``hard`` is accepted for the signature."""
        if self.progress is not None:
            self.progress.refresh()

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """The columns of a bar, as for ``rich.progress.Progress``; override it to show others."""
        from lockstep.callbacks.progress.rich_columns import columns

        return columns(self.theme)

    # -- training ------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the bar anew."""
        if self.is_disabled:
            return
        if self._leave and self._train_task is not None:
            self._stop()
        self._start(trainer)
        if self._train_task is not None:
            self.progress.remove_task(self._train_task)
        self._train_meter.begin(self.total_train_batches)
        # as wide as "Validation", which comes and goes below
        name = self.epoch_description.ljust(len(self.validation_description))
        self._train_task = self._add(name, self._train_meter)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Draw the bar if it is time to."""
        if self._train_task is not None and self._train_meter.due(batch_idx + 1):
            self._draw_training(trainer, pl_module)

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        if self._train_task is not None and self._train_meter.due(batch_idx + 1):
            self._draw_training(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show what was logged at the end of the epoch."""
        if self._train_task is not None:
            self._draw_training(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last bar on the screen."""
        self._stop()

    def _draw_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.progress.metrics = self.get_metrics(trainer, pl_module)
        self.progress.update(self._train_task, completed=self._train_meter.done, refresh=True)

    # -- evaluation ----------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The time of training stands still."""
        if self.is_enabled and not trainer.sanity_checking:
            self._train_meter.pause()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Open a bar for each loader."""
        if self.is_enabled and self.has_dataloader_changed(dataloader_idx):
            name = self.sanity_check_description if trainer.sanity_checking else self.validation_description
            totals = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
            self._begin_loader(trainer, name, totals, dataloader_idx)

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Open a bar for each loader."""
        if self.is_enabled and self.has_dataloader_changed(dataloader_idx):
            self._begin_loader(trainer, self.test_description, trainer.num_test_batches, dataloader_idx)

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Open a bar for each loader."""
        if self.is_enabled and self.has_dataloader_changed(dataloader_idx):
            self._begin_loader(trainer, self.predict_description, trainer.num_predict_batches, dataloader_idx)

    def _begin_loader(self, trainer: Trainer, name: str, totals: list[int | float], dataloader_idx: int) -> None:
        self._start(trainer)
        if self._eval_task is not None and trainer.state.fn == "fit":
            self.progress.remove_task(self._eval_task)
        # a bar that stays on the screen keeps its time
        self._eval_meter.pause()
        self._eval_meter = Meter(interval=self._interval)
        self._eval_meter.begin(totals[dataloader_idx])
        of_several = f" DataLoader {dataloader_idx}" if len(totals) > 1 else ""
        self._eval_task = self._add(name + of_several, self._eval_meter)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw the bar if it is time to."""
        if self._eval_task is not None and self._eval_meter.due(batch_idx + 1):
            self.progress.update(self._eval_task, completed=batch_idx + 1, refresh=True)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In a fit, take the bar of validation away and show its metrics."""
        self.reset_dataloader_idx_tracker()
        if self.progress is None or trainer.state.fn != "fit":
            self._stop()
            return
        if self._eval_task is not None:
            self.progress.remove_task(self._eval_task)
            self._eval_task = None
        self._train_meter.resume()
        if self._train_task is not None:
            self._draw_training(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the bars of testing on the screen."""
        self._stop()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the bars of prediction on the screen."""
        self._stop()

    # -- the end -------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the bars as they are and give the terminal back."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._stop()

    def print(self, *args: Any, sep: str = " ", end: str = "\n", **kwargs: Any) -> None:
        """Print above the bars."""
        if self.progress is None or kwargs.get("file") is not None:
            print(*args, sep=sep, end=end, **kwargs)
        else:
            # text is printed as it is: no markup, no colours for numbers, no wrapping
            text = sep.join(map(str, args))
            self.progress.console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)

    # -- drawing -------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer) -> None:
        if self.progress is None:
            from lockstep.callbacks.progress.rich_columns import Bars

            self.progress = Bars(self.configure_columns(trainer), self.theme, self._console_kwargs)
            self.progress.start()

    def _stop(self) -> None:
        self.reset_dataloader_idx_tracker()
        if self.progress is not None:
            self.progress.stop()
        self.progress = self._train_task = self._eval_task = None

    def _add(self, description: str, meter: Meter) -> Any:
        total = meter.total if math.isfinite(meter.total) else None
        return self.progress.add_task(description, total=total, meter=meter)
