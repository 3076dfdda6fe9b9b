"""LearningRateFinder and BatchSizeFinder: the searches of the Tuner as callbacks of the call that uses the result."""

from __future__ import annotations

from lockstep.callbacks.base import Callback
from lockstep.ground.states import TrainerFn
from lockstep.module import LightningModule
from lockstep.trainer import Trainer
from lockstep.tuner import batch_size, lr_finder
from lockstep.tuner.lr_finder import LRFinder


class LearningRateFinder(Callback):
    """Finds a learning rate by a range test when a fit begins, and goes on with it.

    Args:
        min_lr: the first rate.
        max_lr: the rate that the test rises to.
        num_training_steps: number of rates.
        mode: "exponential" or "linear".
        early_stop_threshold: stop once the smoothed loss is above this many times the best one; None: never.
        update_attr: set the module's attribute to the suggestion, and make the optimizer with it.
        attr_name: the attribute; default: `lr` or `learning_rate`.

    Attributes:
        optimal_lr: what :meth:`lr_find` found, with `results`, `suggestion()` and `plot()`.

    Raises:
        ValueError: for a setting that cannot work.

    Example::

        class AtMilestones(LearningRateFinder):     # a new rate when layers were unfrozen
            def on_fit_start(self, trainer, pl_module):
                pass

            def on_train_epoch_start(self, trainer, pl_module):
                if trainer.current_epoch in (0, 5):
                    self.lr_find(trainer, pl_module)
    """

    SUPPORTED_MODES = lr_finder.MODES

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        self._settings = lr_finder.RangeTest(
            min_lr, max_lr, num_training_steps, mode.lower(), early_stop_threshold, update_attr, attr_name
        )
        self.optimal_lr: LRFinder | None = None

    def lr_find(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Play the range test now; everything but the learning rate is afterwards what it was."""
        show = trainer.progress_bar_callback is not None
        self.optimal_lr = lr_finder.lr_find(trainer, self._settings, show_progress=show)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lr_find(trainer, pl_module)


class BatchSizeFinder(Callback):
    """Finds the largest batch size that fits into memory when a call begins, and goes on with it.

    The loaders must come from hooks of the module or of a data module that read the attribute.

    Args:
        mode: "power": double until memory is used up, and take the size before; "binsearch": then look between the
            two for the largest that fits.
        steps_per_trial: optimizer steps (batches, in an evaluation) that a size is tried for.
        init_val: the first size.
        max_trials: sizes that may fit before the search ends.
        batch_arg_name: the attribute of the module, the data module, or their hparams.
        margin: of "binsearch": the part of the size found that is taken off.
        max_val: the largest size to try.

    Attributes:
        optimal_batch_size: what was found; ``init_val`` before.

    Raises:
        ValueError: for a setting that cannot work.

    Example::

        trainer = Trainer(callbacks=BatchSizeFinder(mode="binsearch"))
        trainer.fit(model, datamodule=data)     # data.batch_size is set, and used
    """

    SUPPORTED_MODES = batch_size.MODES

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        self._settings = batch_size.Search(
            mode.lower(), steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val
        )
        self.optimal_batch_size: int | None = init_val

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        batch_size.check_data(trainer, self._settings.batch_arg_name)

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search now; everything but the batch size is afterwards what it was."""
        self.optimal_batch_size = batch_size.scale_batch_size(trainer, self._settings)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.VALIDATING:  # not the validation of a fit
            self.scale_batch_size(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)
