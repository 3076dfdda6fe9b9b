"""What hooks of a fit freeze, thaw or switch to eval mode, for a fit that resumes behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from lockstep.ground.parameters import plain_name

if TYPE_CHECKING:
    from lockstep.engines.strategy import Strategy
    from lockstep.module import LightningModule

Flags = Mapping[str, bool]
Noted = dict[str, Flags]
"""Which parameters are "trained", and which parts are in "training" mode, by name."""


class HookChanges:
    """Which parameters have been frozen or thawed, and which parts have changed their mode, since training began.

    A hook that does so when an epoch begins does not run again where a fit resumes within that epoch or behind it. What
    the user does with the module behind the fit is not among them.

    Attributes:
        outside: the mode of each part outside of the evaluation under way; None: there is none.
    """

    def __init__(self) -> None:
        self.outside: Flags | None = None
        self._begun: Noted | None = None
        self._ended: Noted | None = None
        self._saved: Noted = {}

    def load(self, saved: Noted) -> None:
        """Take changes out of a checkpoint, for `begin`.

        Raises:
            TypeError: they are none.
        """
        for what in ("trained", "training"):
            if not all(isinstance(value, bool) for value in saved[what].values()):
                raise TypeError(f"{what!r} of a hook's changes is {saved[what]!r:.50}")
        self._saved = saved

    def begin(self, strategy: Strategy, module: LightningModule) -> None:
        """Training begins, behind ``on_train_start``: note what is trained, and make the changes of the checkpoint."""
        self._begun = self._noted(module)
        parameters, parts = strategy.named_parameters(), dict(module.named_modules())
        for name, needed in self._saved.get("trained", {}).items():
            if name in parameters and parameters[name].requires_grad is not needed:
                strategy.set_requires_grad(parameters[name], needed)
        for name, training in self._saved.get("training", {}).items():
            if name in parts:
                parts[name].training = training

    def end(self, module: LightningModule) -> None:
        """The last epoch has ended."""
        self._ended = self._noted(module)

    def state_dict(self, module: LightningModule) -> Noted:
        """The changes, by name; nothing where there are none."""
        if self._begun is None:
            return self._saved
        now = self._ended or self._noted(module)
        changes = {what: _changed(before, now[what]) for what, before in self._begun.items()}
        return dict(changes) if any(changes.values()) else {}

    def _noted(self, module: LightningModule) -> Noted:
        """What is trained now, but for what the steps of manual optimization toggle."""
        toggled = module._toggled
        trained = {plain_name(n): toggled.get(p, p.requires_grad) for n, p in module.named_parameters()}
        return {"trained": trained, "training": self.outside or modes_of(module)}


def modes_of(module: nn.Module) -> dict[str, bool]:
    """Whether each part of a module is in training mode, by name."""
    return {name: part.training for name, part in module.named_modules()}


def _changed(before: Flags, now: Flags) -> dict[str, bool]:
    """What is another one now."""
    return {name: value for name, value in now.items() if before.get(name, value) is not value}
