"""PruneTrial: reports a metric to an Optuna study, and stops the trial on all ranks if the study prunes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.extensions.search.parser import running_trial
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from lockstep.extensions.search.study import StudyTrial
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class PruneTrial(Callback):
    """Callback that reports a logged metric to an Optuna study, and stops the trial if the study prunes it.

    It reports after each validation, or at the end of each training epoch if validation runs exactly once an epoch.
    The value is reduced over the ranks. Rank 0 queries the study's pruner and broadcasts the answer, so that all ranks
    stop at the same step, as with `trainer.should_stop`. Reports are numbered from 0, also across a resume, which makes
    trials with different batch sizes comparable. A fit that resumes from a checkpoint inherits the earlier reports; one
    that restarts does not. If the function of the trial returns no value, the last report is the trial's value.

    Outside of a trial it does nothing.

    Args:
        monitor: name of the logged metric. The search's ``mode`` determines whether smaller or larger is better.

    Attributes:
        checks: number of reports so far.
        pruned: True if the trial was pruned.

    Raises:
        MisconfigurationException: (in a run) ``monitor`` was never logged.
        RuntimeError: (in a run) rank 0 could not read or write the study; raised on the other ranks, while rank 0
            raises the error itself.

    Example::

        def main(hparams):
            trainer = Trainer(callbacks=[PruneTrial(monitor="val_loss")])
            trainer.fit(Model(hparams))

        parser = HyperOptArgumentParser(strategy="optuna", mode="min")
        parser.opt_range("--lr", type=float, low=1e-5, high=1e-1, log_base=10, tunable=True)
        parser.parse_args().optimize_parallel(main, nb_trials=20, nb_workers=4)
    """

    _decides = True

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.checks = 0
        self.pruned = False
        # Taken here, because spawned ranks receive this callback by pickling and have not started the trial.
        self._trial: StudyTrial | None = running_trial()
        self._at_epoch_end = False

    @property
    def state_key(self) -> str:
        """Key of the callback's state, different for each ``monitor``."""
        return self._generate_state_key(monitor=self.monitor)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the trial that runs in this process, and choose the hook that reports to its study."""
        self._at_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
        self._trial = self._trial or running_trial()
        if self._trial is None and stage == "fit":
            rank_zero_info(
                f"PruneTrial(monitor={self.monitor!r}) has no effect, because no trial of a study runs here."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the trial's entry in the study. In a resumed fit, restore the reports made before the checkpoint."""

        def begin(trial: StudyTrial) -> bool:
            trial.resume(self.checks)
            return False

        if not trainer.fast_dev_run:
            self._on_rank_0(trainer, begin)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset ``pruned``, which an earlier fit may have set."""
        self.pruned = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the metric if validation runs exactly once an epoch.

        After an interrupted epoch, the resumed fit reports.
        """
        if self._at_epoch_end and not trainer.fit_loop.is_interrupted:
            self._report(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the metric after each validation of a fit, unless validation runs exactly once an epoch."""
        if not self._at_epoch_end and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._report(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reports so far."""
        return {"checks": self.checks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the number of reports, from which the numbering continues."""
        self.checks = state_dict["checks"]

    def _report(self, trainer: Trainer) -> None:
        # No check for a trial here: only rank 0 may have one, and all ranks must join the collectives below.
        if trainer.fast_dev_run:
            return
        metrics = trainer.reduced_metrics()
        value = metrics.get(self.monitor)
        prunes = self._on_rank_0(trainer, lambda trial: self._ask(trainer, trial, metrics, value))
        self.checks += value is not None
        if prunes:
            self.pruned = True
            trainer.should_stop = True

    def _on_rank_0(self, trainer: Trainer, ask: Callable[[StudyTrial], bool]) -> bool:
        """Call ``ask`` with the trial on rank 0. Return the result, or raise the error, on all ranks.

        Return False if no trial runs here.
        """
        answer: bool | str = False
        problem: Exception | None = None
        if trainer.is_global_zero and self._trial is not None:
            try:
                answer = ask(self._trial)
            except Exception as error:  # the other ranks wait in the broadcast below
                problem, answer = error, f"rank 0: {type(error).__name__}: {error}"
        answer = trainer.strategy.broadcast(answer)
        if problem is not None:
            raise problem
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def _ask(self, trainer: Trainer, trial: StudyTrial, metrics: dict[str, Tensor], value: Tensor | None) -> bool:
        """Report a value of the metric to the study, and return True if the study prunes the trial."""
        if value is not None:
            number = float(torch.as_tensor(value))
            prunes = trial.report(self.checks, number)
            if prunes:
                rank_zero_info(f"trial {trial.number} is pruned: {self.monitor} = {number:.6g} in report {self.checks}")
            return prunes
        message = (
            f"PruneTrial(monitor={self.monitor!r}): no metric with this name was logged. Logged so far: "
            f"{', '.join(map(repr, metrics)) or 'none'}. Log the metric with `self.log({self.monitor!r}, value)`, "
            "or monitor one of the logged metrics."
        )
        why = trainer.fit_loop.lacks_metrics
        if why is None:
            raise MisconfigurationException(message)
        rank_zero_warn(f"{message} {why}, so nothing is reported.")
        return False
