"""`PredictionCheck`: a callback that compares a fit with the saved plan that selected its strategy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lockstep.callbacks.base import Callback
from lockstep.extensions.balancing.planner.plan import SavedPlan
from lockstep.ground.device import synchronize
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.memory_use import memory_peak
from lockstep.ground.parameters import plain_name
from lockstep.ground.rank import rank_zero_info
from lockstep.hooks import ModuleHooks
from lockstep.loop.hooks import is_overridden
from lockstep.memory.meter import readable

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

WARM_UP, COUNTED = 3, 8
"""Number of batches before the measurement, and number of measured batches."""


class PredictionCheck(Callback):
    """A callback that logs how time and memory of a fit's first steps compare with a saved plan.

    Args:
        plan: the saved plan.
        where: the user's argument, for messages.

    Raises:
        MisconfigurationException: when a fit starts, for another model or another precision.
    """

    def __init__(self, plan: SavedPlan, where: str) -> None:
        self.plan, self.where = plan, where
        self._moments: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error if model or precision differ from the plan's, or a device has too little memory."""
        from lockstep.extensions.balancing.planner.hardware import usable_memory
        from lockstep.extensions.balancing.planner.profile import key_of

        self._moments = []
        if stage != "fit":
            return
        device = trainer.strategy.root_device
        sharing = trainer.strategy.world.local_size if device.type == "cpu" else 1
        self.plan.check_machine(usable_memory(device) / sharing, self.where)
        if trainer.precision != self.plan.precision:
            raise MisconfigurationException(
                f'{self.where} was made for precision="{self.plan.precision}", and this Trainer has '
                f'precision="{trainer.precision}": use the plan\'s precision, or create a plan for this precision.'
            )
        # configure_model creates layers later than this hook
        if not is_overridden("configure_model", pl_module, ModuleHooks):
            named = ((plain_name(name), tuple(p.shape), p.requires_grad) for name, p in pl_module.named_parameters())
            self.plan.check_model(type(pl_module).__name__, key_of(named), self.where)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the start times of the fit's first batches, and log the comparison once all are recorded."""
        if len(self._moments) > WARM_UP + COUNTED:
            return
        # a steady step never waits for the device; the first ones do, to be measured
        synchronize(trainer.strategy.root_device)
        self._moments.append(time.perf_counter())
        if len(self._moments) == WARM_UP + COUNTED + 1:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        import statistics

        gaps = [b - a for a, b in zip(self._moments[WARM_UP:], self._moments[WARM_UP + 1 :], strict=False)]
        seconds, device = statistics.median(gaps), trainer.strategy.root_device
        expected = readable(self.plan.memory)
        most = memory_peak(device)
        if most:
            memory = f"at most {readable(most)} of memory, predicted {expected} ({self.plan.memory / most - 1:+.0%})"
        else:  # a CPU's allocator does not record a peak
            memory = f"{readable(trainer.memory().total)} are in use now, {expected} predicted for the peak of a step"
        rank_zero_info(
            f"{self.where}: a batch takes {1000 * seconds:.3g} ms, predicted {1000 * self.plan.seconds:.3g} "
            f"({self.plan.seconds / seconds - 1:+.0%}); {memory}."
        )
