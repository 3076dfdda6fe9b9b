"""Hooks of a LightningModule: methods that run at certain points of a run and that a model may override."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.ground.transfer import move_data_to_device
from lockstep.ground.types import STEP_OUTPUT


class ModuleHooks:
    """Hooks of a LightningModule, for a model to override. Each runs after the callbacks' hooks of the same name.

    In the hooks of batches, ``batch`` is the batch on its device, ``batch_idx`` its number in the epoch, from 0, and
    ``dataloader_idx`` the number of its loader, from 0.

    Attributes:
        prepare_data_per_node: :meth:`prepare_data` runs once per node (True) or once in total (False).
    """

    prepare_data_per_node: bool = True

    # -- a run ---------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download and unpack data, in one process per node, or in one process with ``prepare_data_per_node=False``.

        The other processes do not get attributes set here.
        """

    def setup(self, stage: str) -> None:
        """Create data-dependent objects in every process. ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up. Runs as the last hook of a call, with the same ``stage`` as :meth:`setup`."""

    def configure_model(self) -> None:
        """Create layers in every process, before weights are loaded and the strategy shards them.

        It may run more than once, so check whether the layers exist.

        Example::

            def configure_model(self):
                if self.net is None:
                    self.net = nn.Linear(4096, 4096)
        """

    def configure_sharded_model(self) -> None:
        """Create layers. Former name of :meth:`configure_model`, before Lightning 2."""

    def on_fit_start(self) -> None:
        """Run when a fit starts, before the sanity check."""

    def on_fit_end(self) -> None:
        """Run when a fit has ended."""

    # -- training ------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Run once before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """Run once after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Run at the start of an epoch."""

    def on_train_epoch_end(self) -> None:
        """Run at the end of an epoch, after its validation. Log values of the whole epoch here."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Run before each training batch, which is already on the device. Return -1 to skip the rest of the epoch."""
        return None

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        """Run after a training batch and its update, if one was due.

        Args:
            outputs: what ``training_step`` returned, with the loss detached.
            batch: batch on its device.
            batch_idx: number of the batch in the epoch, from 0.
        """

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Run after an accumulation window's first forward, before the previous window's gradients become None.

        ``optimizer`` is the optimizer whose gradients are set to None.
        """

    def on_before_backward(self, loss: Tensor) -> None:
        """Run before the backward of ``loss``, which is already multiplied by the micro-batch's share of the window."""

    def on_after_backward(self) -> None:
        """Run after each backward. After a window's last backward, gradients are already reduced over the ranks."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Run once per accumulation window, before clipping; ``.grad`` has the gradient of the whole window.

        Example::

            def on_before_optimizer_step(self, optimizer):
                norm = torch.linalg.vector_norm(self.head.weight.grad)
                self.log("head_grad_norm", norm)
        """

    # -- validation, test, prediction ----------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Run before a validation."""

    def on_validation_end(self) -> None:
        """Run after a validation; its metrics are in ``trainer.callback_metrics``."""

    def on_validation_epoch_start(self) -> None:
        """Run before the first batch of a validation."""

    def on_validation_epoch_end(self) -> None:
        """Run after the last batch of a validation. Log values of the whole epoch here."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before a validation batch, which is already on the device. ``dataloader_idx`` is its loader's index."""

    def on_validation_batch_end(
        self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after a validation batch; ``outputs`` is what ``validation_step`` returned."""

    def on_validation_model_zero_grad(self) -> None:
        """Set gradients to None to free their memory, before a validation that follows an optimizer step."""
        self.zero_grad()  # type: ignore[attr-defined]

    def on_validation_model_eval(self) -> None:
        """Put the model into eval mode for a validation."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Restore train and eval modes after a validation; by default, each submodule returns to its previous mode."""
        self.train()  # type: ignore[attr-defined]

    def on_test_start(self) -> None:
        """Run before a test."""

    def on_test_end(self) -> None:
        """Run after a test; its metrics are in ``trainer.callback_metrics``."""

    def on_test_epoch_start(self) -> None:
        """Run before the first batch of a test."""

    def on_test_epoch_end(self) -> None:
        """Run after the last batch of a test. Log values of the whole epoch here."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before each test batch, which is already on the device."""

    def on_test_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after a test batch; ``outputs`` is what ``test_step`` returned."""

    def on_test_model_eval(self) -> None:
        """Put the model into eval mode for a test."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """Restore train and eval modes after a test; by default, each submodule returns to its previous mode."""
        self.train()  # type: ignore[attr-defined]

    def on_predict_start(self) -> None:
        """Run before a prediction."""

    def on_predict_end(self) -> None:
        """Run after a prediction."""

    def on_predict_epoch_start(self) -> None:
        """Run before the first batch of a prediction."""

    def on_predict_epoch_end(self) -> None:
        """Run after the last batch of a prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before each prediction batch, which is already on the device."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after a prediction batch; ``outputs`` is what ``predict_step`` returned."""

    def on_predict_model_eval(self) -> None:
        """Put the model into eval mode for a prediction."""
        self.eval()  # type: ignore[attr-defined]

    # -- data ----------------------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """Return the training loader, or a dict or list of loaders. lockstep distributes the samples over the ranks.

        Raises:
            NotImplementedError: the hook is not overridden. The other loader hooks raise the same error.

        Example::

            def train_dataloader(self):
                return DataLoader(self.dataset, batch_size=32, shuffle=True)
        """
        raise NotImplementedError("`train_dataloader` is not defined")

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of loaders."""
        raise NotImplementedError("`val_dataloader` is not defined")

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of loaders."""
        raise NotImplementedError("`test_dataloader` is not defined")

    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a list of loaders."""
        raise NotImplementedError("`predict_dataloader` is not defined")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before its transfer to the device, and return it. By default, the batch does not change.

        Args:
            batch: batch that the loader yielded.
            dataloader_idx: number of its loader, from 0.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return a batch on ``device``.

        Override it for batches with tensors in other objects than dicts, lists, tuples, dataclasses and objects with
        a method ``to``.

        Args:
            batch: result of :meth:`on_before_batch_transfer`.
            device: device of this rank.
            dataloader_idx: number of the batch's loader, from 0.

        Example::

            def transfer_batch_to_device(self, batch, device, dataloader_idx):
                if isinstance(batch, Graph):
                    return Graph(batch.nodes.to(device), batch.edges.to(device))
                return super().transfer_batch_to_device(batch, device, dataloader_idx)
        """
        return move_data_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after its transfer to the device, and return it. By default, the batch does not change.

        Args:
            batch: result of :meth:`transfer_batch_to_device`.
            dataloader_idx: number of its loader, from 0.
        """
        return batch

    # -- checkpoints ---------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries to a checkpoint before it is written: plain types and tensors only.

        Example::

            def on_save_checkpoint(self, checkpoint):
                checkpoint["vocabulary"] = self.vocabulary
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read entries of a checkpoint before its weights are loaded."""
