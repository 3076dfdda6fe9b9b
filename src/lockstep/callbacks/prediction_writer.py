"""BasePredictionWriter: stores predictions together with the indices of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class WriteInterval(str, Enum):
    """Choice of when predictions are written: after each batch, at the end, or both."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """True if predictions are written after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """True if predictions are written at the end, all at once."""
        return self is not WriteInterval.BATCH


class BasePredictionWriter(Callback):
    """Base class of callbacks that store the results of ``trainer.predict``. Subclasses implement the storing.

    On several ranks each one writes its own share, so include the rank in the file names. Every sample is
    predicted once, on one of the ranks; ``batch_indices`` maps the predictions to samples of the data set.
    Ranks may have different numbers of batches, so do not communicate in :meth:`write_on_batch_end`.

    Args:
        write_interval: "batch" calls :meth:`write_on_batch_end` after each batch, "epoch" calls
            :meth:`write_on_epoch_end` once, "batch_and_epoch" calls both. For "batch",
            ``trainer.predict(..., return_predictions=False)`` saves the memory of all predictions.

    Raises:
        MisconfigurationException: ``write_interval`` has another value.

    Example::

        class Writer(BasePredictionWriter):
            def __init__(self, folder):
                super().__init__("epoch")
                self.folder = folder

            def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
                torch.save((predictions, batch_indices), f"{self.folder}/{trainer.global_rank}.pt")

        Trainer(callbacks=[Writer("out")]).predict(model, loader, return_predictions=False)
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        known = [interval.value for interval in WriteInterval]
        if write_interval not in known:
            raise MisconfigurationException(
                f"{type(self).__name__}(write_interval={write_interval!r}): the interval is unknown. Pass one of "
                f"{known}."
            )
        self.interval = WriteInterval(write_interval)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Store the prediction of one batch.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            prediction: the value that ``predict_step`` returned.
            batch_indices: indices into the data set of the samples in the batch, in its order; empty if they are
                unknown: for an iterable data set, or without a ``DataLoader``.
            batch: the batch that was passed to ``predict_step``.
            batch_idx: index of the batch among those of this rank and loader.
            dataloader_idx: index of the loader.

        Raises:
            NotImplementedError: a subclass with interval "batch" or "batch_and_epoch" does not define the method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define write_on_batch_end. Define it to store a batch's prediction."
        )

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Store the predictions for all batches that this rank has processed.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            predictions: the values that ``predict_step`` returned for each batch, on the CPU; with several
                loaders, one such list for each.
            batch_indices: for each loader (even if there is only one) a list of the batches' indices, as in
                :meth:`write_on_batch_end`.

        Raises:
            NotImplementedError: a subclass with interval "epoch" or "batch_and_epoch" does not define the method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define write_on_epoch_end. Define it to store all predictions."
        )

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.interval.on_batch:
            indices = trainer.predict_loop.current_batch_indices
            if not indices:
                warn_once(
                    "BasePredictionWriter: `batch_indices` is empty, because the loader has no sample indices (its "
                    "data set is iterable, or it is not a DataLoader)."
                )
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.interval.on_epoch:
            loop = trainer.predict_loop
            self.write_on_epoch_end(trainer, pl_module, loop.predictions, loop.epoch_batch_indices)
