"""Memory of the made-up device is counted, given back, and comes to an end."""

from __future__ import annotations

import gc

import pytest
import torch

from lockstep.ground.memory_use import is_oom_error
from tests.accelerator.on_device import on_device


@on_device()
def test_memory_is_counted_by_device_and_given_back() -> None:
    module = torch.get_device_module("madeup")
    gc.collect()
    before = module.memory_allocated(1), module.memory_allocated(2)
    module.reset_peak_memory_stats(1)
    one = torch.zeros(1000, device="madeup:1")
    view, other = one[:10], one * 2
    del one
    assert module.memory_allocated(1) - before[0] == 8000
    assert module.memory_allocated(2) == before[1]
    del view, other
    assert module.memory_allocated(1) == before[0]
    assert module.max_memory_allocated(1) - before[0] == 8000
    assert torch.accelerator.max_memory_allocated(1) == module.max_memory_allocated(1)
    assert torch.accelerator.memory_allocated(1) == before[0]


@on_device()
def test_a_device_runs_out_of_memory() -> None:
    from tests.accelerator.madeup import having

    module = torch.get_device_module("madeup")
    with having(memory=module.memory_allocated(1) + 5000):
        kept = torch.zeros(1000, device="madeup:1")
        ways = (lambda: torch.zeros(1000, device="madeup:1"), kept.clone, lambda: torch.ones(999).to("madeup:1"))
        for make in ways:
            with pytest.raises(torch.OutOfMemoryError, match="madeup out of memory") as caught:
                make()
            assert is_oom_error(caught.value)
            del caught
        gc.collect()
        free, total = module.mem_get_info(1)
        assert (free, total - module.memory_allocated(1)) == (1000, 1000)
        del kept, ways, make
        torch.zeros(1000, device="madeup:1")


@on_device()
def test_a_storage_that_is_freed_is_counted_as_freed() -> None:
    module = torch.get_device_module("madeup")
    values = torch.zeros(1000, device="madeup:1")
    before, storage = module.memory_allocated(1), values.untyped_storage()
    storage.resize_(0)
    assert (module.memory_allocated(1), storage.size()) == (before - 4000, 0)
    storage.resize_(4000)
    assert (module.memory_allocated(1), storage.nbytes()) == (before, 4000)
    storage.resize_(0)
    del values, storage
    assert module.memory_allocated(1) == before - 4000
