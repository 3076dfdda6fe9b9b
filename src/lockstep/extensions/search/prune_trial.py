"""PruneTrial: tells the study how a trial gets on, and ends the trial on all ranks when the study gives it up."""

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
    """Reports a logged metric to the study of a search with ``strategy="optuna"``, and stops a trial that it prunes.

    A report is made after each validation, or at the end of each training epoch where validation runs exactly once an
    epoch. The value is reduced over the ranks, rank 0 reports it and asks the study's pruner, and all ranks hear the
    answer: a pruned trial ends on all of them at the same step, as by `trainer.should_stop`. Reports are counted from
    0, also over a resume, so that trials with other batch sizes compare. A fit that goes on from a checkpoint keeps the
    reports before it; one that begins anew keeps none of an earlier start. The last value is that of the trial, where
    its function returns none.

    Outside of a trial it does nothing.

    Args:
        monitor: name of the logged metric. The search's ``mode`` says whether smaller is better.

    Attributes:
        checks: reports so far.
        pruned: whether the trial was stopped.

    Raises:
        MisconfigurationException: (in a run) ``monitor`` was never logged.

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
        self._trial: StudyTrial | None = running_trial()  # here, as ranks that are spawned have begun none
        self._at_epoch_end = False

    @property
    def state_key(self) -> str:
        """One state for each ``monitor``."""
        return self._generate_state_key(monitor=self.monitor)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Decide when to report, and find the trial."""
        self._at_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
        self._trial = self._trial or running_trial()
        if self._trial is None and stage == "fit":
            rank_zero_info(f"PruneTrial(monitor={self.monitor!r}): no trial of a study runs here, so none is pruned.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the study which reports the fit goes on from: those that its checkpoint knows of."""

        def begin(trial: StudyTrial) -> bool:
            trial.resume(self.checks)
            return False

        if not trainer.fast_dev_run:
            self._on_rank_0(trainer, begin)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget that an earlier fit was stopped."""
        self.pruned = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report here where validation runs once an epoch; a resume does so for an interrupted epoch."""
        if self._at_epoch_end and not trainer.fit_loop.is_interrupted:
            self._report(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report here otherwise."""
        if not self._at_epoch_end and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._report(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The number of reports."""
        return {"checks": self.checks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from there."""
        self.checks = state_dict["checks"]

    def _report(self, trainer: Trainer) -> None:
        # on all ranks alike: whether there is a trial, only rank 0 may know
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
        """What the trial answers rank 0, on all ranks; its error on all of them, too. Without a trial, no."""
        answer: bool | str = False
        problem: Exception | None = None
        if trainer.is_global_zero and self._trial is not None:
            try:
                answer = ask(self._trial)
            except Exception as error:  # the other ranks wait to hear of it
                problem, answer = error, f"rank 0: {type(error).__name__}: {error}"
        answer = trainer.strategy.broadcast(answer)
        if problem is not None:
            raise problem
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def _ask(self, trainer: Trainer, trial: StudyTrial, metrics: dict[str, Tensor], value: Tensor | None) -> bool:
        """Report, and ask whether the trial is to be stopped."""
        if value is not None:
            number = float(torch.as_tensor(value))
            prunes = trial.report(self.checks, number)
            if prunes:
                rank_zero_info(f"trial {trial.number} is pruned: {self.monitor} = {number:.6g} in check {self.checks}")
            return prunes
        message = (
            f"PruneTrial(monitor={self.monitor!r}): no metric of that name was logged. Logged so far: "
            f"{', '.join(map(repr, metrics)) or 'none'}. Log it with `self.log({self.monitor!r}, value)`, "
            "or name one of those."
        )
        why = trainer.fit_loop.lacks_metrics
        if why is None:
            raise MisconfigurationException(message)
        rank_zero_warn(f"{message} {why}: it is not reported.")
        return False
