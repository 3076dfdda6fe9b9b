"""EarlyStopping: ends training when a logged metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log, rank_prefixed_message, rank_zero_warn, warn_once

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class EarlyStoppingReason(Enum):
    """Reason why :class:`EarlyStopping` ended the training; ``NOT_STOPPED`` if it did not."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Callback that ends training when a logged metric has not improved for a number of checks.

    A check happens once after each validation, or at the end of each training epoch (see
    ``check_on_train_epoch_end``). The value is first reduced over the ranks, so that all of them stop together and
    keep the same state.

    Args:
        monitor: name of the logged metric.
        min_delta: a change of at most this much (absolute) does not count as an improvement.
        patience: number of checks without improvement after which training stops. It counts checks, not
            epochs: ``check_val_every_n_epoch=10, patience=3`` trains for at least 40 epochs.
        verbose: report improvements and the reason for stopping.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is.
        strict: raise an error if the metric was never logged; otherwise the check is skipped.
        check_finite: stop when the metric is NaN or infinite.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this.
        check_on_train_epoch_end: check at the end of training epochs (True) or of validations (False). None
            means True if validation runs exactly once an epoch, else False.
        log_rank_zero_only: with ``verbose``, report on rank 0 alone instead of on each rank.

    Attributes:
        wait_count: checks since the last improvement.
        best_score: best value so far, a scalar tensor on the CPU.
        stopped_epoch: the epoch in which training was stopped; 0 if it was not.
        stopping_reason: the condition that ended this fit.
        stopping_reason_message: this condition as a sentence; None if training was not stopped.

    Raises:
        MisconfigurationException: ``mode`` is neither "min" nor "max"; or, at a check with ``strict``, ``monitor`` was
            never logged.

    Example::

        trainer = Trainer(callbacks=[EarlyStopping("val_loss", patience=5)])
    """

    mode_dict: ClassVar = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar = {"min": "<", "max": ">"}
    _decides = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"EarlyStopping(mode={mode!r}): the mode is unknown. Pass 'min' or 'max'.")
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.best_score = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._user_choice = check_on_train_epoch_end
        self._check_on_train_epoch_end = bool(check_on_train_epoch_end)

    @property
    def monitor_op(self) -> Callable[..., Tensor]:
        """Function that returns True if its first argument is the better value: ``torch.lt`` or ``torch.gt``."""
        compare: Callable[..., Tensor] = self.mode_dict[self.mode]
        return compare

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints, different for each pair of ``monitor`` and ``mode``."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose whether to check after validation or after training epochs, unless the user has chosen."""
        if self._user_choice is None:
            self._check_on_train_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the reason why an earlier fit was ended, but not the wait count."""
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the metric, unless :meth:`on_validation_end` checks it.

        An interrupted epoch is checked after the resume.
        """
        is_due = self._check_on_train_epoch_end
        if self._user_choice is None and not trainer.fit_loop.expects_validation:
            is_due = True
        if is_due and not trainer.fit_loop.is_interrupted:
            self._check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the metric, unless :meth:`on_train_epoch_end` checks it."""
        if not self._check_on_train_epoch_end and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._check(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the wait count, best value and reason to stop, with the keys of Lightning 2.6."""
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. The key "stopping_reason" may be missing, as in states from Lightning before 2.6.

        Raises:
            ValueError: the best score is not a single number.
        """
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = torch.as_tensor(state_dict["best_score"]).squeeze().cpu()
        if self.best_score.ndim:
            raise ValueError(f"best_score has the shape {tuple(self.best_score.shape)}, but must be a single number")
        self.patience = state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    def _check(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        metrics = trainer.reduced_metrics()
        value = metrics.get(self.monitor)
        if value is None:
            self._report_missing(trainer, metrics)
            return
        reason, message = self._judge(torch.as_tensor(value).detach().squeeze().cpu())
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            self.stopping_reason = reason
            self.stopping_reason_message = message
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = True
        if message and self.verbose and (trainer.is_global_zero or not self.log_rank_zero_only):
            rank = trainer.global_rank if trainer.world_size > 1 else None
            log.info(rank_prefixed_message(message, rank))

    def _report_missing(self, trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        message = (
            f"Early stopping conditioned on metric {self.monitor!r}, which is not available. Logged so far: "
            f"{', '.join(map(repr, metrics)) or 'none'}. Log the metric with `self.log({self.monitor!r}, value)`, "
            "or monitor one of the logged metrics."
        )
        why = trainer.fit_loop.lacks_metrics
        if why is not None:
            rank_zero_warn(f"{message} {why}, so the metric is not checked.")
        elif self.strict:
            raise MisconfigurationException(message)
        elif self.verbose:
            warn_once(message, category=RuntimeWarning)

    def _better(self, value: Tensor | float, than: Tensor | float) -> bool:
        return bool(value < than) if self.mode == "min" else bool(value > than)

    def _judge(self, current: Tensor) -> tuple[EarlyStoppingReason, str | None]:
        """Compare a value with the best value and the thresholds. Return (reason to stop, message or None).

        The wait count and the best value are updated.
        """
        shown = f"{self.monitor} = {current.item():.6g}"
        if self.check_finite and not torch.isfinite(current):
            best = f"the best value was {self.best_score.item():.6g}"
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{shown} is not finite; {best}."
        if self.stopping_threshold is not None and self._better(current, self.stopping_threshold):
            message = f"{shown} has passed the stopping threshold {self.stopping_threshold}."
            return EarlyStoppingReason.STOPPING_THRESHOLD, message
        if self.divergence_threshold is not None and self._better(self.divergence_threshold, current):
            message = f"{shown} is worse than the divergence threshold {self.divergence_threshold}."
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, message
        # added to the new value and not to the best, which may be infinite
        delta = self.min_delta if self.mode == "min" else -self.min_delta
        if self._better(current + delta, self.best_score):
            before, self.best_score, self.wait_count = self.best_score.item(), current, 0
            known = f", from {before:.6g}" if math.isfinite(before) else ""
            return EarlyStoppingReason.NOT_STOPPED, f"{shown} is the best so far{known}."
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, None
        message = (
            f"{self.monitor} did not improve in {self.wait_count} checks; "
            f"the best value was {self.best_score.item():.6g}."
        )
        return EarlyStoppingReason.PATIENCE_EXHAUSTED, message
