"""Ranks that have the made-up device, whatever the rest of the suite runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.testing import devices
from tests.accelerator.madeup import AUTOLOAD, NAME, missing
from tests.tools.pool import RankPool

PATH = os.pathsep.join([AUTOLOAD, str(Path(__file__).parents[2])])
"""The ``PYTHONPATH`` of a process that is to have the device."""


PRELOAD = (
    "lockstep.testing.equivalence",
    "lockstep.trainer",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    *(["torchmetrics"] if find_spec("torchmetrics") else []),
)
"""What ranks would import, once for all of them."""


@pytest.fixture(scope="session")
def madeup() -> Iterator[RankPool]:
    """A rank pool as ``ranks``, of processes that have the device; each forgets what was set in a test."""
    if missing():
        pytest.skip(missing())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(AUTOLOAD)
        patch.setenv("PYTHONPATH", PATH)
        patch.setenv(devices.VARIABLE, NAME)
        pool = RankPool(2, PRELOAD)
    with pool:
        yield pool
