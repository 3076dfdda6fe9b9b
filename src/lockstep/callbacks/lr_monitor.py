"""LearningRateMonitor: logs the learning rates of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class LearningRateMonitor(Callback):
    """Callback that logs the learning rate of each parameter group.

    The names are ``lr-Adam``; ``lr-Adam-1`` for the second optimizer of a class; ``lr-Adam/pg1``,
    ``lr-Adam/pg2`` if it has several parameter groups. A ``"name"`` in a scheduler's dict replaces
    ``lr-Adam``, a ``"name"`` in a parameter group replaces ``pg1``.

    Args:
        logging_interval: ``"step"`` logs all rates every ``log_every_n_steps`` steps, ``"epoch"`` at the
            start of each epoch, None each one at its scheduler's own interval. Optimizers without a scheduler
            are logged with either.
        log_momentum: also log ``<name>-momentum`` (the first of ``betas`` in Adam's family; 0 if an
            optimizer has none).
        log_weight_decay: also log ``<name>-weight_decay``.

    Attributes:
        lrs: all values logged so far, by name.
        last_momentum_values, last_weight_decay_values: the values logged last, by name.

    Raises:
        MisconfigurationException: ``logging_interval`` is invalid, the Trainer has no logger, or two parameter
            groups of an optimizer have the same name.

    Example::

        Trainer(callbacks=[LearningRateMonitor(logging_interval="step", log_momentum=True)])
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise MisconfigurationException(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): the interval is unknown. Pass "
                "'step', 'epoch' or None."
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}
        self._last_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if the Trainer has no logger, or if two parameter groups have the same name."""
        if not trainer.loggers:
            raise MisconfigurationException(
                "LearningRateMonitor needs a logger, but the Trainer has none. Remove the callback, or remove "
                "`logger=False`."
            )
        self._last_step = -1
        self.lrs = {name: [] for _, names, _ in _named_groups(trainer) for name in names}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Log learning rates before every ``log_every_n_steps``-th step, unless ``logging_interval`` is "epoch"."""
        self._on_any_batch_start(trainer, pl_module, batch_idx)

    def _on_any_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        step = trainer.fit_loop.progress.windows
        if self.logging_interval == "epoch" or step == self._last_step:
            return
        # a fit that is about to stop logs all further steps that `min_steps` or `min_epochs` require
        every = trainer.log_every_n_steps
        if (not every or (step + 1) % every) and not trainer.should_stop:
            return
        self._last_step = step
        self._write(trainer, "step")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log learning rates at the start of an epoch, unless ``logging_interval`` is "step"."""
        if self.logging_interval != "step":
            self._write(trainer, "epoch")

    def _write(self, trainer: Trainer, interval: str) -> None:
        stats: dict[str, float] = {}
        for optimizer, names, own_interval in _named_groups(trainer):
            # an optimizer without a scheduler has no interval of its own
            if self.logging_interval is None and own_interval not in (None, interval):
                continue
            for group, name in zip(optimizer.param_groups, names, strict=True):
                stats.update(self._stats(group, name))
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in stats.items()})
        for logger in trainer.loggers if stats else ():
            logger.log_metrics(stats, step=trainer.fit_loop.progress.windows)

    def _stats(self, group: dict[str, Any], name: str) -> dict[str, float]:
        if name not in self.lrs:
            # groups were added: `lr-Adam` is now `lr-Adam/pg1`
            self.lrs[name] = self.lrs.pop(name.removesuffix("/pg1"), [])
        stats = {name: float(group["lr"])}
        self.lrs[name].append(stats[name])
        if self.log_momentum:
            momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
            stats[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = float(momentum)
        if self.log_weight_decay:
            decay = float(group.get("weight_decay", 0.0))
            stats[f"{name}-weight_decay"] = self.last_weight_decay_values[f"{name}-weight_decay"] = decay
        return stats


def _named_groups(trainer: Trainer) -> Iterator[tuple[Optimizer, list[str], str | None]]:
    """Yield (optimizer, names of its parameter groups, interval of its scheduler or None)."""
    seen: list[Optimizer] = []
    of_class: Counter[type[Optimizer]] = Counter()
    for config in trainer.lr_scheduler_configs:
        optimizer = config.scheduler.optimizer
        seen.append(optimizer)
        yield (optimizer, _group_names(optimizer, config.name or _numbered(optimizer, of_class)), config.interval)
    for wrapped in trainer.optimizers:
        optimizer = getattr(wrapped, "optimizer", wrapped)
        if not any(optimizer is other for other in seen):
            yield optimizer, _group_names(optimizer, _numbered(optimizer, of_class)), None


def _numbered(optimizer: Optimizer, of_class: Counter[type[Optimizer]]) -> str:
    kind = type(optimizer)
    of_class[kind] += 1
    return f"lr-{kind.__name__}" + (f"-{of_class[kind] - 1}" if of_class[kind] > 1 else "")


def _group_names(optimizer: Optimizer, name: str) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1 and not groups[0].get("name"):
        return [name]
    parts = [group.get("name", f"pg{i}") for i, group in enumerate(groups, start=1)]
    twice = sorted(part for part, count in Counter(parts).items() if count > 1)
    if twice:
        raise MisconfigurationException(
            f"LearningRateMonitor: parameter groups of {name.removeprefix('lr-')} share the name "
            f'{", ".join(map(repr, twice))}. Set a different "name" for each group, or no names.'
        )
    return [f"{name}/{part}" for part in parts]
