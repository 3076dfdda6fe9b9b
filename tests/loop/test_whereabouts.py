"""Where a rank is, as those who look for hangs are told."""

from __future__ import annotations

from typing import Any

from lockstep.loop.call import _whereabouts
from tests.loop.pieces import Slope, numbers, quiet


class Tells(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, int] = {}

    def note(self) -> None:
        hook, batch = _whereabouts(self.trainer.session)
        self.told.setdefault(hook, batch)

    def setup(self, stage: str) -> None:
        self.note()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note()


def test_no_batch_is_told_in_set_up_and_in_validation() -> None:
    module = Tells()
    quiet(max_epochs=1, num_sanity_val_steps=0).fit(module, numbers(2), numbers(1))
    assert module.told == {"setup": -1, "training_step": 0, "validation_step": -1}
