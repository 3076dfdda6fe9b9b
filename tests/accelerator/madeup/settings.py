"""What the made-up device can do, how many there are, and the faults that tests switch on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

NAME = "madeup"
"""As in ``torch.device(NAME, 0)``, ``torch.madeup`` and ``accelerator=NAME``."""
BACKEND = "madeupccl"
"""The process group's, as in ``torch.distributed.init_process_group(BACKEND)``."""
VARIABLE = "MADEUP_DEVICE"
"""Settings of processes that are yet to start: ``MADEUP_DEVICE="float64=0,memory=1000000"``."""


@dataclass
class Settings:
    """How the device behaves. Numbers only, so that a variable of the environment can carry them."""

    count: int = 4
    """Device numbers."""
    float64: int = 1
    """0: the device has neither float64 nor complex128."""
    memory: int = 1 << 40
    """Bytes of each device; what goes beyond raises torch.OutOfMemoryError."""
    queued: int = 0
    """1: every operator is queued, and returns before it has run; 0: it runs at once where nothing is queued."""
    takes_cpu: int = -1
    """Whether a process group carries tensors of the CPU: 1, 0, or -1, as the group's backends say."""
    lost_ranks_end: int = 0
    """1: a collective whose peer is gone fails, as gloo's does; 0: it never ends, as NCCL's."""


def _of_environment() -> Settings:
    made = Settings()
    known = {each.name for each in fields(Settings)}
    for part in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"{VARIABLE}: {name!r} is no setting of the made-up device: {', '.join(sorted(known))}")
        setattr(made, name, int(value))
    return made


settings = _of_environment()
"""Of this process."""


@contextmanager
def having(**changed: int) -> Iterator[None]:
    """Inside, the device behaves otherwise: ``having(float64=0)``."""
    before = {name: getattr(settings, name) for name in changed}
    vars(settings).update(changed)
    try:
        yield
    finally:
        vars(settings).update(before)
