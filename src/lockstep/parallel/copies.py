"""Copies of a container, pickled or deep: each makes what belongs to its process and group at its first forward."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.parallel.start import find_group

MADE_ANEW = (
    "process_group",
    "_reducer",
    "_make_reducer",
    "_watch",
    "_checks",
    "_late",
    "_release",
    "_world",
    "_holders",
)


class Copies(nn.Module):
    """The part of `lockstep.parallel.ddp.DistributedDataParallel` that lets it be copied."""

    process_group: Any
    _reducer: Any

    def _kept(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in MADE_ANEW}

    def _restore(self, state: dict[str, Any], group: Any) -> None:
        self.process_group, self._reducer = group, None
        super().__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "pickling a DistributedDataParallel: only one over the default process group can be pickled, since "
                "another group cannot be found again; pickle model.module, or its state dict"
            )
        return self._kept()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, find_group(None, None, state["_modules"]["module"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.process_group)] = self.process_group  # a communication hook's state may hold it
        made._restore(copy.deepcopy(self._kept(), memo), self.process_group)
        return made
