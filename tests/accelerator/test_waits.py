"""Steps of every kind that `scripts/gpu` looks at, on the made-up device: they wait where they may, nowhere else."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.gpu.parts.waits import cases, waited
from tests.accelerator.on_device import on_device

STEPS = 6


@on_device(1)
def test_a_step_waits_for_the_device_where_it_is_allowed() -> None:
    """An average of weights waited in each update, for a counter on its way to the device."""
    found = {}
    for name in cases(STEPS):
        found[name] = waited("madeup", name, STEPS)  # raises where it waits more often than it may
        if dist.is_initialized():
            dist.destroy_process_group()
    assert {numbers["steps"] for numbers in found.values()} == {4}
    assert found["16-mixed"]["waits a step"] == 1
    assert found["16-mixed"]["places"].startswith("precision/base.py:")
