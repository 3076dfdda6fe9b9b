"""Which devices tests run on: the CPU, or what ``LOCKSTEP_TEST_ACCELERATOR`` names, as ``Trainer(accelerator=...)``."""

from __future__ import annotations

import os

from lockstep.ground.accelerators import Accelerator

VARIABLE = "LOCKSTEP_TEST_ACCELERATOR"


def chosen_accelerator() -> str | Accelerator:
    """What tests give to ``Trainer(accelerator=...)`` where the device is all one to them; ``"cuda"``: one card for all
    ranks, since many machines have no second one."""
    name = os.environ.get(VARIABLE, "cpu")
    if name != "cuda":
        return name
    from lockstep.testing.shared_card import SharedCard

    return SharedCard()
