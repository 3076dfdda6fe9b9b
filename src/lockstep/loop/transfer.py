"""A batch's way to the device: the three transfer hooks, and nothing at all where there is nothing to do."""

from __future__ import annotations

from typing import Any

from lockstep.datamodule import LightningDataModule
from lockstep.hooks import ModuleHooks
from lockstep.loop.hooks import is_overridden
from lockstep.module import LightningModule
from lockstep.strategies.base import Strategy

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Moves batches to the strategy's device through the hooks that the data module or the module overrides.

    Attributes:
        idle: whether a call would give back the batch as it is; the loops then do not call.
    """

    def __init__(self, module: LightningModule, datamodule: LightningDataModule | None, strategy: Strategy) -> None:
        chosen = {}
        for name in HOOKS:
            if datamodule is not None and is_overridden(name, datamodule, LightningDataModule):
                chosen[name] = getattr(datamodule, name)
            elif is_overridden(name, module, ModuleHooks):
                chosen[name] = getattr(module, name)
        self._before = chosen.get(HOOKS[0])
        self._after = chosen.get(HOOKS[2])
        self._device = strategy.root_device
        self._move = chosen.get(HOOKS[1])
        if self._move is None and self._device.type != "cpu":
            self._move = module.transfer_batch_to_device
        self._convert = strategy.precision.convert_input
        self.idle = not chosen and self._move is None and self._convert is None

    def __call__(self, batch: object, dataloader_idx: int = 0) -> Any:
        """The batch on the device, in the run's precision."""
        if self._convert is not None:
            batch = self._convert(batch)
        if self._before is not None:
            batch = self._before(batch, dataloader_idx)
        if self._move is not None:
            batch = self._move(batch, self._device, dataloader_idx)
        if self._after is not None:
            batch = self._after(batch, dataloader_idx)
        return batch
