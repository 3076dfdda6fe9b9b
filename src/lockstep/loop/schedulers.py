"""Class `Schedulers`, which steps a fit's learning rate schedulers at the right times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_warn, warn_once
from lockstep.ground.types import LRSchedulerConfig
from lockstep.loop.hooks import is_replaced
from lockstep.loop.session import Session
from lockstep.module import LightningModule


class Schedulers:
    """Steps the learning rate schedulers of a fit. Under manual optimization the user steps them.

    Attributes:
        by_step: schedulers with the interval "step" that do not monitor a metric.
        own_step: True if the module overrides ``lr_scheduler_step``.
        module: the module of the fit.
        by_metric: schedulers that monitor a metric, by their interval.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.module = session.module
        self.own_step = is_replaced("lr_scheduler_step", session.module, LightningModule)
        self.use(session.strategy.lr_scheduler_configs)

    def use(self, configs: list[LRSchedulerConfig]) -> None:
        """Replace the schedulers by those in ``configs``."""
        of: dict[tuple[str, bool], list[LRSchedulerConfig]] = defaultdict(list)
        if self._session.module.automatic_optimization:  # otherwise the user steps them
            for config in configs:
                of[config.interval, bool(config.reduce_on_plateau)].append(config)
        self.by_step, self._by_epoch = of["step", False], of["epoch", False]
        self.by_metric = {interval: of[interval, True] for interval in ("step", "epoch")}

    def after_update(self, count: int) -> None:
        """After an update, step the schedulers in :attr:`by_step`. ``count``: micro-batches of the epoch so far."""
        self._step_all(self.by_step, count)

    def after_epoch(self) -> None:
        """Step schedulers with the interval "epoch" that do not monitor a metric, after the epoch's last update."""
        self._step_all(self._by_epoch, self._session.fit.progress.epoch + 1)

    def _step_all(self, configs: Iterable[LRSchedulerConfig], count: int) -> None:
        for config in configs:
            if count % config.frequency == 0:
                self._step(config, None)

    def _step(self, config: LRSchedulerConfig, metric: Tensor | None) -> None:
        try:
            if self.own_step or metric is not None:
                self.module.lr_scheduler_step(config.scheduler, metric)
            else:
                config.scheduler.step()  # type: ignore[call-arg]  # a plateau's has a metric
        except (ValueError, KeyError) as error:  # torch's are of a zip, and name neither optimizer nor groups
            message = _explain_new_groups(config.scheduler)
            if message is None:
                raise
            raise MisconfigurationException(message) from error

    def watch_metric(self, interval: str, count: int) -> None:
        """Step the schedulers that monitor a metric, after the validation that may have logged the metric."""
        session = self._session
        due = [config for config in self.by_metric[interval] if count % config.frequency == 0]
        if due and session.world_size > 1 and interval == "step":  # all ranks must step by the same number
            session.share_step_values()
        for config in due:
            metrics = session.callback_metrics()
            metric = metrics.get(config.monitor or "")
            if metric is not None:
                self._step(config, metric)
            elif config.strict:
                message = (
                    f"The lr scheduler {type(config.scheduler).__name__} is conditioned on metric {config.monitor!r}, "
                    f"which is not available. Available metrics are: {sorted(metrics)}. "
                )
                why = session.lacks_metrics
                if why is None:
                    raise MisconfigurationException(
                        f"{message}Log the metric, or set strict=False in the scheduler's dict."
                    )
                rank_zero_warn(f"{message}{why}, so the scheduler is not stepped.")
            else:
                warn_once(
                    f"The lr scheduler's metric {config.monitor!r} was not logged, so the scheduler is not stepped.",
                    category=RuntimeWarning,
                )


def _explain_new_groups(scheduler: object) -> str | None:
    """Explain a scheduler's error if parameter groups were added to its optimizer. Return None otherwise."""
    optimizer = getattr(scheduler, "optimizer", None)
    parts = [scheduler, *getattr(scheduler, "_schedulers", ())]  # SequentialLR and ChainedScheduler have several
    known = [len(part.base_lrs) for part in parts if hasattr(part, "base_lrs")]
    if optimizer is None or not known or len(optimizer.param_groups) <= min(known):
        return None
    return (
        f"The optimizer has {len(optimizer.param_groups)} parameter groups by now, and the lr scheduler "
        f"{type(scheduler).__name__} was made when it had {min(known)}: a finetuning callback or `add_param_group` has "
        "added one. Pass the frozen layers to the optimizer in `configure_optimizers`, or use a scheduler that accepts "
        "new groups: StepLR, ExponentialLR, LinearLR, PolynomialLR, ReduceLROnPlateau."
    )
