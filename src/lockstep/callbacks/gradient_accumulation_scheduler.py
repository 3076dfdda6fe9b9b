"""GradientAccumulationScheduler: changes the number of micro-batches per step, epoch by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Callback that changes ``trainer.accumulate_grad_batches`` from epoch to epoch.

    ``Trainer(accumulate_grad_batches={...})`` does the same; the callback is for code that already has it. During a fit
    ``trainer.accumulate_grad_batches`` is the number of the current epoch; afterwards it is 1 again.
    ``trainer.estimated_stepping_batches`` counts by the schedule.

    Args:
        scheduling: dict from an epoch (counted from 0) to the micro-batches of a step from then on. Before the
            first epoch in it, the number is 1.

    Attributes:
        scheduling: the argument, with an entry for epoch 0.
        epochs: the epochs in ``scheduling``, ascending.

    Raises:
        TypeError: ``scheduling`` is empty or not a dict.
        MisconfigurationException: an epoch is not an int of at least 0, or a number of micro-batches is not an int
            of at least 1. At the setup of the fit: ``Trainer(accumulate_grad_batches=...)`` is not 1, or the
            module uses manual optimization.

    Example::

        # 8 micro-batches in epochs 0 to 3, 4 in epochs 4 to 7, 1 from then on
        Trainer(callbacks=GradientAccumulationScheduler(scheduling={0: 8, 4: 4, 8: 1}))
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, dict) or not scheduling:
            raise TypeError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): the schedule is not a dict, or is empty. "
                "Pass a dict with at least one entry, from an epoch to the number of micro-batches per step, such as "
                "{4: 2}."
            )
        for what, values, least in (
            ("an epoch", scheduling.keys(), 0),
            ("a number of micro-batches", scheduling.values(), 1),
        ):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise MisconfigurationException(
                        f"GradientAccumulationScheduler(scheduling={scheduling!r}): {value!r} is not {what}. Pass an "
                        f"int of at least {least}."
                    )
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)
        self._scheduled_trainer: Trainer | None = None

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return True if an optimizer step uses several micro-batches in any epoch."""
        return any(number > 1 for number in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of micro-batches per optimizer step in ``epoch``, counted from 0."""
        return self.scheduling[max(first for first in self.epochs if first <= epoch)]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the Trainer's flags, and pass the schedule to the Trainer before steps are counted.

        Raises:
            MisconfigurationException: as described in the class, for ``stage`` "fit".
        """
        if stage != "fit":
            return
        self._restore_flag(trainer)  # from a fit that did not reach its teardown
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "GradientAccumulationScheduler works only with automatic optimization. Remove the callback, and step "
                "the optimizer at every k-th batch in `training_step`."
            )
        given = trainer.accumulate_grad_batches
        if given != 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={given!r}) and GradientAccumulationScheduler({self.scheduling}) "
                "both set the number of micro-batches per step. Remove one of them."
            )
        _set_flag(trainer, dict(self.scheduling))
        self._scheduled_trainer = trainer

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the number of micro-batches per step to the result of :meth:`get_accumulate_grad_batches`."""
        epoch = trainer.current_epoch
        wanted = self.get_accumulate_grad_batches(epoch)
        if wanted != trainer.config.accumulation(epoch):
            _set_flag(trainer, wanted)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the Trainer's own ``accumulate_grad_batches``."""
        self._restore_flag(trainer)

    def _restore_flag(self, trainer: Trainer) -> None:
        if self._scheduled_trainer is trainer:
            _set_flag(trainer, 1)
        self._scheduled_trainer = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_scheduled_trainer": None}


def _set_flag(trainer: Trainer, value: int | dict[int, int]) -> None:
    # The attribute is read as the current epoch's number; the flag that is set may be a schedule.
    trainer.accumulate_grad_batches = value  # type: ignore[misc, assignment]
