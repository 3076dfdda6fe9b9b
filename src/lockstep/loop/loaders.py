"""Sources of the loaders of a call: its arguments, the data module's hooks or the module's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.datamodule import LightningDataModule
from lockstep.ground.methods import kept
from lockstep.ground.rank import rank_zero_warn
from lockstep.hooks import ModuleHooks
from lockstep.loop.hooks import is_overridden
from lockstep.module import LightningModule


@dataclass
class RunLoaders:
    """The loaders of one call of the Trainer, by stage ("train", "val", "test", "predict").

    Attributes:
        given: the loaders that were passed to the call.
        datamodule: the data module of the call, or None.
        module: the LightningModule of the call; None between calls.
    """

    given: dict[str, Any]
    datamodule: LightningDataModule | None
    module: LightningModule | None

    def __getstate__(self) -> dict[str, Any]:
        return kept(self)

    def hook(self, stage: str) -> Callable[[], Any] | None:
        """Return the hook that returns a stage's loaders; None if they were passed, or there are none."""
        name, hook = f"{stage}_dataloader", None
        if self.given.get(stage) is not None:
            return None
        if self.datamodule is not None and is_overridden(name, self.datamodule, LightningDataModule):
            hook = getattr(self.datamodule, name)
        elif is_overridden(name, self.module, ModuleHooks):
            hook = getattr(self.module, name)
        return hook

    def check_reload(self, every: int) -> None:
        """Warn if loaders are to be reloaded but were passed as objects."""
        given = [f"{stage}_dataloaders" for stage, loaders in self.given.items() if loaders is not None]
        if every and given:
            rank_zero_warn(
                f"Trainer(reload_dataloaders_every_n_epochs={every}): fit() got {' and '.join(given)} as objects, "
                "which stay the same; define the loader hooks in the module or a data module to have them made anew."
            )

    def defined(self, stage: str) -> bool:
        """Return True if there is a loader for this stage."""
        return self.given.get(stage) is not None or self.hook(stage) is not None

    def request(self, stage: str) -> Any:
        """Return the loader or loaders of this stage; None if there are none."""
        hook = self.hook(stage)
        return self.given.get(stage) if hook is None else hook()
