"""Choice of the device on which tests run: ``LOCKSTEP_TEST_ACCELERATOR``, or the CPU if it is not set."""

from __future__ import annotations

import os

from lockstep.ground.accelerators import Accelerator

VARIABLE = "LOCKSTEP_TEST_ACCELERATOR"


def chosen_accelerator() -> str | Accelerator:
    """Return the value for ``Trainer(accelerator=...)`` in tests that run on any device.

    ``"cuda"`` is one card for all ranks, since many machines do not have a second one.
    """
    name = os.environ.get(VARIABLE, "cpu")
    if name != "cuda":
        return name
    # Not at the top: the import registers a backend of process groups in torch.
    from lockstep.testing.shared_card import SharedCard

    return SharedCard()
