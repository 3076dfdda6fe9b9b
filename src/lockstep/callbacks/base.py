"""Base class of callbacks, with hooks that the Trainer calls at fixed points of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


LENT = ("log", "log_dict")


class Callback:
    """Base class for code that runs at fixed points of a fit, validation, test or prediction, outside the model.

    Override the hooks you need and pass the object to ``Trainer(callbacks=[...])``. Only overridden hooks are
    called: other hooks cost nothing in a step. Hooks run on every rank, in the order of the
    ``callbacks`` list; one that communicates must do so on all ranks.

    A callback with a state returns it from :meth:`state_dict`. It is stored in each checkpoint under
    ``checkpoint["callbacks"][state_key]`` and passed to :meth:`load_state_dict` on resume. Checkpoints
    contain no code, so use tensors, numbers, strings and dicts, lists or tuples of them.

    Hooks receive the Trainer that runs, ``trainer``, and its module, ``pl_module``. In the hooks of batches, ``batch``
    is the batch on its device, ``batch_idx`` its number in the epoch, from 0 (in evaluations, its number among the
    batches of this rank and loader), and ``dataloader_idx`` the number of its loader, from 0.

    Example::

        class Greeter(Callback):
            def on_train_epoch_end(self, trainer, pl_module):
                trainer.print(f"epoch {trainer.current_epoch} is done")

    Attributes:
        log, log_dict: the module's methods, while a call of the Trainer runs.
    """

    log: Callable[..., None]
    log_dict: Callable[..., None]

    averages_weights: ClassVar[bool] = False
    """True for a callback that replaces the module's weights by an average; a run accepts only one such callback."""
    replaces_parameters: ClassVar[bool] = False
    """True for a callback that replaces a module's parameters with new objects."""

    # It decides by logged values: its `on_train_epoch_end` is called last, after all others have logged.
    _decides = False
    # The ranks' windows are measured for it, and passed to `_on_step_times`.
    _receives_step_times = False
    # Callbacks of one `state_key` with the same value here have the same state: one of them is saved.
    _shares_state: object = None
    # Key of a second state dict of the module that it adds to a checkpoint.
    _other_weights: str | None = None
    # It searches at the start of a call, before other callbacks run: they use what it finds.
    _searches = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, without the module's ``log`` methods."""
        own = vars(self).items()
        return {n: v for n, v in own if not (n in LENT and isinstance(getattr(v, "__self__", None), nn.Module))}

    # -- a run ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run before all other hooks; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run after all other hooks, to clean up; ``stage`` is as in :meth:`setup`."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when the fit starts, before the sanity check of validation."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when the fit has ended."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run before the few validation batches that are run before training."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run after the few validation batches that are run before training."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Run when an exception (including Ctrl-C) ends the run; the exception is raised again afterwards."""

    # -- training ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run once before the first epoch of training, after the sanity check."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run once after the last epoch of training."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when an epoch of training starts."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when an epoch of training ends, after validation; ``pl_module.log`` may be used here."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Run before each ``training_step``, after the batch was moved to the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Run after each ``training_step`` and the optimizer step, if one was due; ``outputs`` is the step's result."""

    def _on_any_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        """Run in place of :meth:`on_train_batch_start` on a rank that has no samples in this micro-batch."""

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        """Run in place of :meth:`on_train_batch_end` on a rank that has no samples in this micro-batch."""

    def _on_step_times(self, trainer: Trainer, by_rank: Sequence[Any]) -> None:
        """Run every few accumulation windows on all ranks. ``by_rank``: typical window times since the last call."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Run before ``loss.backward()``.

        ``loss`` is a scalar tensor, already multiplied by the micro-batch's share of the window and, under
        "16-mixed", by the loss scale.
        """

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run after ``loss.backward()``, before gradients are clipped."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Run before ``optimizer.step()``, with the accumulated gradients before they are clipped."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Run before ``optimizer.zero_grad()``."""

    # -- validation ----------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when validation starts."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when validation has ended and its metrics are in ``trainer.callback_metrics``."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run after the last validation batch; ``pl_module.log`` may be used here."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each ``validation_step``."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Run after each ``validation_step``; ``outputs`` is the step's result."""

    # -- test ----------------------------------------------------------------------------------------------

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when testing starts."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when testing has ended and its metrics are in ``trainer.callback_metrics``."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run after the last test batch; ``pl_module.log`` may be used here."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each ``test_step``."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Run after each ``test_step``; ``outputs`` is the step's result."""

    # -- prediction ----------------------------------------------------------------------------------------

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when prediction starts."""

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run when prediction has ended."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run before the first batch of prediction."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run after the last batch of prediction."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each ``predict_step``."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Run after each ``predict_step``; ``outputs`` is the prediction."""

    # -- checkpoints ---------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Key of the callback's state in a checkpoint; two callbacks of one class need different keys."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: object) -> str:
        """Return a ``state_key`` from the class's name and the arguments that distinguish its instances."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint; an empty dict (the default) saves nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that :meth:`state_dict` returned when the checkpoint was written."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is written, to change its dict in place."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Run after a checkpoint was read and before it is used."""
