"""Fragments of parameters in slices: every element is in one, and starts where kernels want it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.parallel.bucket import offsets
from lockstep.parallel.zero.exchange import STEP, Fragment, SharedBuffer, fragments, padded
from lockstep.parallel.zero.optimizers import update_within
from lockstep.testing.pool import RankPool

# -- fragments of parameters in slices -----------------------------------------------------------------------


@given(
    numels=st.lists(st.integers(0, 300), max_size=8),
    world=st.integers(1, 5),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_every_element_lies_in_one_fragment_that_begins_at_a_step(numels: list[int], world: int, itemsize: int) -> None:
    starts, end = offsets(numels, itemsize, STEP)
    length = padded(end, itemsize, world)
    assert length >= end
    assert length % world == 0
    size = length // world
    covered = [0] * len(numels)
    for rank in range(world):
        for index, part in enumerate(fragments(starts, numels, rank * size, (rank + 1) * size)):
            if part.stop == part.start:
                continue
            assert part.start == covered[index]
            assert part.offset == starts[index] + part.start
            assert rank * size <= part.offset
            assert part.offset + part.stop - part.start <= (rank + 1) * size
            assert part.start * itemsize % STEP == 0
            covered[index] = part.stop
    assert covered == numels


def test_a_slice_without_a_parameter_has_an_empty_fragment_of_it() -> None:
    assert fragments([0, 64], [64, 32], 64, 96)[0] == Fragment(64, 64, 64)


# -- slices that the ranks of a host exchange over common memory ---------------------------------------------


SIZES = [48, 0, 120]


def _exchanged() -> list[list[int]]:
    """Five rounds of two buffers in each of two layouts; a rank is busy, and what is sent is written over."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = SharedBuffer.open(None, 20)
    assert stage is not None
    found = []
    for _ in range(2):
        assert stage.lay_out(SIZES)
        buffers = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
        for round_ in range(5):
            coming = {}
            for index in (0, 2):
                part = buffers[index].view(world, -1)[rank]
                part.fill_(10 * round_ + rank)
                coming[index] = stage.send(index, buffers[index])
                part.fill_(255)
            if rank == 1:
                time.sleep(0.02)
            for index in (0, 2) if rank else (2, 0):
                coming[index].wait()
                coming[index].wait()
                parts = buffers[index].view(world, -1)
                found.append([int(parts[other][-1]) for other in range(world) if other != rank])
    stage.close()
    return found


def test_every_rank_gets_what_the_others_sent(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks(3).run(_exchanged)):
        expected = [[10 * round_ + other for other in range(3) if other != rank] for round_ in range(5)]
        assert found == [values for values in expected for _ in range(2)] * 2


def _nobody_comes(leaves: bool) -> str:
    stage = SharedBuffer.open(None, 20)
    assert stage is not None
    assert stage.lay_out([32])
    if dist.get_rank() == 1:
        if leaves:
            stage.close()
        dist.barrier()
        stage.close()
        return ""
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        stage.send(0, torch.zeros(32, dtype=torch.uint8)).wait(timedelta(seconds=0.3))
    assert time.monotonic() - begun < 10
    dist.barrier()
    stage.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("leaves", "text"), [(True, "rank 1 left .* while rank 0 waited"), (False, r"rank 1 did not come .* 0\.3 s")]
)
def test_a_rank_that_is_gone_or_late_is_named(ranks: RankPool, leaves: bool, text: str) -> None:
    told = ranks(2).run(_nobody_comes, leaves)[0]
    assert re.search(text, told), told


# -- an update that works on other tensors than its hooks see ------------------------------------------------


class _Noted(torch.optim.SGD):
    """Notes its update, or fails in it; calls the step of its base, whose hooks run once more."""

    told: list[str]
    fails = False

    def step(self, closure: Any = None) -> Any:
        self.told.append("update")
        if self.fails:
            raise KeyError("update")
        return super().step(closure)


@contextmanager
def _inside(told: list[str]) -> Iterator[None]:
    told.append("in")
    try:
        yield
    finally:
        told.append("out")


def _noted() -> _Noted:
    optimizer = _Noted([nn.Parameter(torch.ones(1))], 0.1)
    told = optimizer.told = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    return optimizer


def test_hooks_run_outside_and_the_update_inside() -> None:
    optimizer = _noted()
    told = optimizer.told
    with update_within(optimizer, _inside(told), lambda: told.append("then")):
        optimizer.step()
    # the hooks of the base's step, in the middle, belong to the update
    assert told == ["before", "in", "update", "before", "after", "out", "then", "after"]
    told.clear()
    optimizer.step()
    assert told == ["before", "update", "before", "after", "after"]


def test_an_update_that_raises_leaves_nothing_behind() -> None:
    optimizer = _noted()
    optimizer.fails = True
    with pytest.raises(KeyError), update_within(optimizer, _inside(optimizer.told), pytest.fail):
        optimizer.step()
    assert optimizer.told == ["before", "in", "update", "out"]
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (1, 1)


def test_an_optimizer_of_another_kind_has_no_hooks() -> None:
    told: list[str] = []
    with update_within(object(), _inside(told), lambda: told.append("then")):
        told.append("update")
    assert told == ["in", "update", "out", "then"]
