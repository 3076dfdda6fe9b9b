"""Slices that the ranks of a host exchange over common memory: values, order, ranks that are busy or gone."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.parallel.zero.exchange import SharedBuffer
from lockstep.testing.pool import RankPool

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
