"""The hooks of a LightningModule: points of a run at which the model's own code may act."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.ground.transfer import move_data_to_device
from lockstep.ground.types import STEP_OUTPUT


class ModuleHooks:
    """Override what you need; only overridden hooks are called, after those of the callbacks.

    Attributes:
        prepare_data_per_node: :meth:`prepare_data` runs once on every node (True) or once in all (False).
    """

    prepare_data_per_node: bool = True

    # -- a run ---------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download and unpack, on one process of each node; assign no state here."""

    def setup(self, stage: str) -> None:
        """Build what depends on data, on every process; ``stage``: fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Called last, with the ``stage`` of :meth:`setup`."""

    def configure_model(self) -> None:
        """Create layers late, on every process, before weights are loaded; must bear being called twice."""

    def configure_sharded_model(self) -> None:
        """The old name of :meth:`configure_model`."""

    def on_fit_start(self) -> None:
        """Called when a fit begins."""

    def on_fit_end(self) -> None:
        """Called when a fit has ended."""

    # -- training ------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Called once before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """Called once after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called at the start of an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called at the end of an epoch, after its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a training batch; return -1 to end the epoch here."""
        return None

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        """Called after a training batch, with what ``training_step`` returned (the loss detached)."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called after the first forward of a window, before its gradients are dropped."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before a backward, with the loss as it is weighted in its window."""

    def on_after_backward(self) -> None:
        """Called after a backward; at a window's last one the gradients are reduced over the ranks."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called once per window with its whole gradient, before clipping."""

    # -- validation, test, prediction ----------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Called before a validation."""

    def on_validation_end(self) -> None:
        """Called after a validation, when its metrics are there."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of a validation."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last batch of a validation; log here what needs the whole epoch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation batch."""

    def on_validation_model_zero_grad(self) -> None:
        """Called before a validation at a window's end: drops the gradients to free memory."""
        self.zero_grad()  # type: ignore[attr-defined]

    def on_validation_model_eval(self) -> None:
        """Put the model into eval mode for a validation."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Put the model back into train mode; not overridden, each submodule gets its own mode back."""
        self.train()  # type: ignore[attr-defined]

    def on_test_start(self) -> None:
        """Called before a test."""

    def on_test_end(self) -> None:
        """Called after a test, when its metrics are there."""

    def on_test_epoch_start(self) -> None:
        """Called before the first batch of a test."""

    def on_test_epoch_end(self) -> None:
        """Called after the last batch of a test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a test batch."""

    def on_test_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test batch."""

    def on_test_model_eval(self) -> None:
        """Put the model into eval mode for a test."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """Put the model back into train mode after a test."""
        self.train()  # type: ignore[attr-defined]

    def on_predict_start(self) -> None:
        """Called before a prediction."""

    def on_predict_end(self) -> None:
        """Called after a prediction."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch of a prediction."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch of a prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a prediction batch."""

    def on_predict_model_eval(self) -> None:
        """Put the model into eval mode for a prediction."""
        self.eval()  # type: ignore[attr-defined]

    # -- data ----------------------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """The loader, or a dict or list of loaders, of training."""
        raise NotImplementedError("`train_dataloader` is not defined")

    def val_dataloader(self) -> Any:
        """The loader, or a list of loaders, of validation."""
        raise NotImplementedError("`val_dataloader` is not defined")

    def test_dataloader(self) -> Any:
        """The loader, or a list of loaders, of a test."""
        raise NotImplementedError("`test_dataloader` is not defined")

    def predict_dataloader(self) -> Any:
        """The loader, or a list of loaders, of a prediction."""
        raise NotImplementedError("`predict_dataloader` is not defined")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it moves to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to ``device``; override it for batches whose tensors lockstep can't find."""
        return move_data_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch

    # -- checkpoints ---------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint before it is written; plain types and tensors only."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint before the weights are loaded."""
