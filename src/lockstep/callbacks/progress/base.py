"""The base class of progress bars: what there is to show, without how to show it."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.ground.view import ModuleView, TrainerView


class ProgressBar(Callback):
    """Knows the totals, descriptions and metrics of a run; a subclass draws them.

    Rank 0 alone draws: the others are disabled in :meth:`setup`, so a subclass that overrides it calls
        ``super()``.

    Example::

        class Percent(ProgressBar):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if self.is_enabled:
                    print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %", end="\\r")
    """

    # on the class too, for subclasses that do not call `super().__init__()`
    _trainer: TrainerView | None = None
    _enabled = True
    _current_eval_dataloader_idx: int | None = None

    def __init__(self) -> None:
        self._trainer = None
        self._enabled = True
        self._current_eval_dataloader_idx = None

    def setup(self, trainer: TrainerView, pl_module: ModuleView, stage: str) -> None:
        """Remember the trainer; be quiet on all ranks but 0."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: settings; a bar that is being drawn stays here."""
        return {**vars(self), "_trainer": None}

    @property
    def trainer(self) -> TrainerView:
        """The trainer that this bar belongs to; there is none before :meth:`setup`."""
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__}.trainer: this bar was not given to a Trainer that runs.")
        return self._trainer

    # -- on and off ----------------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """Whether anything is drawn."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is drawn."""
        return not self.is_enabled

    def enable(self) -> None:
        """Draw from now on."""
        self._enabled = True

    def disable(self) -> None:
        """Draw nothing from now on."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without spoiling the bar; what ``trainer.print`` calls. Arguments as of ``print``."""
        print(*args, **kwargs)

    # -- what to show --------------------------------------------------------------------------------------

    def get_metrics(
        self, trainer: TrainerView, pl_module: ModuleView
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands beside the bar: the logger's version and all that was logged with ``prog_bar=True``.

        Called only when the bar is drawn, for it is here that values leave the device. Override it to show
        something else::

            def get_metrics(self, trainer, pl_module):
                items = super().get_metrics(trainer, pl_module)
                items.pop("v_num", None)
                return items
        """
        metrics = trainer.progress_bar_metrics
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        # last, since a narrow terminal cuts the end off
        return {**values, **{name: v for name, v in get_standard_metrics(trainer).items() if name not in values}}

    @property
    def sanity_check_description(self) -> str:
        """What the sanity check is called."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """What training is called before its first epoch."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """What validation is called."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """What testing is called."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """What prediction is called."""
        return "Predicting"

    @property
    def epoch_description(self) -> str:
        """The epoch that runs, and the last one if that is known: ``Epoch 3/9``."""
        last = self.trainer.max_epochs
        return f"Epoch {self.trainer.current_epoch}" + (f"/{last - 1}" if last is not None and last > 0 else "")

    @property
    def total_train_batches(self) -> int | float:
        """Batches of this epoch of training; inf if that is not known."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
            return min(trainer.num_training_batches, left)
        return trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """Batches of all validation loaders; 0 in an epoch that does not validate."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every and (trainer.current_epoch + 1) % every):
            return 0
        return sum(trainer.num_val_batches)

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of the validation loader that is being read."""
        trainer = self.trainer
        return self._current(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Batches of the test loader that is being read."""
        return self._current(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Batches of the prediction loader that is being read."""
        return self._current(self.trainer.num_predict_batches)

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Whether this is another loader than at the last call."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """No loader is being read any more."""
        self._current_eval_dataloader_idx = None

    def _current(self, batches: list[int | float]) -> int | float:
        assert self._current_eval_dataloader_idx is not None, "asked for a loader's total outside its batches"
        return batches[self._current_eval_dataloader_idx]


def in_notebook() -> bool:
    """Whether this process draws into a Jupyter notebook: no terminal, yet it shows bars."""
    return "ipykernel" in sys.modules


def get_standard_metrics(trainer: TrainerView) -> dict[str, int | str]:
    """``v_num``: the versions of the loggers, of one that is a string its last four characters."""
    versions = list(dict.fromkeys(logger.version for logger in trainer.loggers if logger.version not in (None, "")))
    if not versions:
        return {}
    version = versions[0] if len(versions) == 1 else "_".join(map(str, versions))
    return {"v_num": version[-4:] if isinstance(version, str) else version}
