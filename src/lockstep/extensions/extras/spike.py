"""SpikeDetection: ends training when the loss jumps, and records the batches that the next run should skip."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.checkpoint import storage
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once

if TYPE_CHECKING:
    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


SAVED = ("last_val", "mode", "warmup", "atol", "rtol")
"""Attributes in the callback's state, under their own names."""


class TrainingSpikeException(RuntimeError):
    """Error that :class:`SpikeDetection` raises on every rank when the loss on any rank jumps.

    Args:
        batch_idx: index, within the epoch, of the batch with this loss.
    """

    def __init__(self, batch_idx: int, *args: object, **kwargs: object) -> None:
        super().__init__(f"Training spike detected in batch {batch_idx}", *args, **kwargs)
        self.batch_idx = batch_idx


class SpikeDetection(Callback):
    """Callback that raises :class:`TrainingSpikeException` when the loss jumps away from its running mean.

    The loss of a batch is a spike if it is worse than that of the previous batch, and its distance from the running
    mean is at least ``atol`` *and* at least ``rtol`` times the running mean. Each rank checks its own loss; a spike on
    any rank ends training on all. The batch that damaged the weights may be the previous one, so rank 0 writes both
    batches to a JSON file, as indices within the epoch: ``[41, 42]``. It is up to you to skip them in the next run.

    At every batch, reading the loss waits for the device, and several ranks exchange a message.

    Args:
        mode: ``"min"`` if a smaller loss is better, ``"max"`` if a larger one is.
        window: number of batches in the running mean.
        warmup: number of batches at the start of each epoch that are not checked.
        atol: smallest absolute distance of a spike; None for any.
        rtol: smallest distance of a spike in multiples of the running mean; None for any.
        exclude_batches_path: the file, or a folder for a file ``skip_batches.json``; default: the Trainer's
            ``default_root_dir``.
        finite_only: treat every NaN or infinite loss as a spike. Otherwise it is checked like any other, but does not
            enter the running mean.

    Attributes:
        bad_batches: the recorded batches, including those of earlier attempts of the run.

    Raises:
        TrainingSpikeException: at a spike.
        MisconfigurationException: ``mode`` is invalid, or ``window`` is below 1.
        OSError: at a spike, the JSON file cannot be written.

    Example::

        Trainer(callbacks=SpikeDetection(window=20, warmup=100, rtol=3.0, exclude_batches_path="skip.json"))
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"SpikeDetection(mode={mode!r}): mode must be 'min' or 'max'.")
        if not isinstance(window, int) or window < 1:
            raise MisconfigurationException(
                f"SpikeDetection(window={window!r}): the number of batches must be an int of at least 1."
            )
        self.mode = mode
        self.warmup = warmup
        self.atol = atol
        self.rtol = rtol
        self.exclude_batches_path = None if exclude_batches_path is None else os.fspath(exclude_batches_path)
        self.finite_only = finite_only
        self.last_val = 0.0
        self.bad_batches: list[int] = []
        self._recent: deque[float] = deque(maxlen=window)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Check the batch's loss on each rank. If the loss is a spike on any rank, raise on all ranks.

        Raises:
            TrainingSpikeException: the loss of any rank is a spike; raised on all ranks.
        """
        with trainer.strategy.with_all_ranks():
            self._check_loss(trainer, _loss(outputs), batch_idx)

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        self._check_loss(trainer, None, batch_idx)

    def _check_loss(self, trainer: Trainer, loss: float | None, batch_idx: int) -> None:
        spike = loss is not None and batch_idx >= self.warmup and self._is_spike(loss)
        finite = loss is None or math.isfinite(loss)
        # All ranks must raise at the same batch, or the others would wait in their next collective.
        if trainer.world_size > 1:
            seen = torch.tensor([spike, not finite], dtype=torch.int32)
            anywhere = trainer.strategy.reduce(seen, reduce_op="max").tolist()
            spike, finite = bool(anywhere[0]), not anywhere[1]
        if spike:
            self._write(trainer, batch_idx)
            raise TrainingSpikeException(batch_idx)
        if loss is not None and (self.finite_only or finite):
            self._recent.append(loss)
            self.last_val = loss

    def _is_spike(self, loss: float) -> bool:
        if self.finite_only and not math.isfinite(loss):
            return True
        change = loss - self.last_val
        if change <= 0 if self.mode == "min" else change >= 0:
            return False
        known = [value for value in self._recent if not math.isnan(value)]
        # Without a mean, the comparisons with NaN below are False: no spike, if `atol` or `rtol` is set.
        mean = sum(known) / len(known) if known else math.nan
        far = self.atol is None or abs(loss - mean) >= abs(self.atol)
        return far and (self.rtol is None or abs(loss - mean) >= abs(self.rtol * mean))

    def _write(self, trainer: Trainer, batch_idx: int) -> None:
        self.bad_batches += [number for number in (batch_idx - 1, batch_idx) if number >= 0]
        folder = trainer.default_root_dir if self.exclude_batches_path is None else self.exclude_batches_path
        path = folder if folder.endswith(".json") else os.path.join(folder, "skip_batches.json")
        self.exclude_batches_path = path
        if trainer.is_global_zero:
            with storage.replacing(path) as file:
                file.write(json.dumps(self.bad_batches, indent=4).encode())

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, the recorded batches and the recent losses. Checkpoints contain rank 0's state."""
        return {
            **{name: getattr(self, name) for name in SAVED},
            "bad_batches": list(self.bad_batches),
            "bad_batches_path": self.exclude_batches_path,
            "recent": list(self._recent),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, but keep this run's path of the file with the recorded batches."""
        vars(self).update({name: state_dict[name] for name in SAVED}, last_val=float(state_dict["last_val"]))
        self.bad_batches = list(state_dict["bad_batches"])
        # Lightning's checkpoints have no running mean.
        self._recent = deque(state_dict.get("recent", ()), maxlen=self._recent.maxlen)


def _loss(outputs: STEP_OUTPUT) -> float | None:
    """Return the batch's loss; None if ``training_step`` returned no loss on this rank."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if loss is None:
        warn_once("SpikeDetection: `training_step` returned no loss, so there is nothing to check.", key="spike")
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"SpikeDetection reads the loss of each batch, but `training_step` returned {type(outputs).__name__}. "
            'Return the loss, a tensor with one element, or a dict with the key "loss".'
        )
    return float(loss)
