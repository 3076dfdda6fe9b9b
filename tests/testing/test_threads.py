"""Ranks as threads: real groups, and failures that name their cause."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from tests.tools.pool import RankFailure, RankTimeout, run_threads


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_thread_is_a_rank(world: int) -> None:
    def gather() -> list[int]:
        seen: list[int] = [-1] * world
        dist.all_gather_object(seen, dist.get_rank() * 10)
        return seen

    assert run_threads(world, gather) == [[rank * 10 for rank in range(world)]] * world
    assert not dist.is_initialized()


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_failure_names_its_rank(culprit: int) -> None:
    def refuse() -> None:
        if dist.get_rank() == culprit:
            raise KeyError("no such metric")
        dist.barrier()

    with pytest.raises(RankFailure, match=rf"refuse failed on rank {culprit} of 3: KeyError") as caught:
        run_threads(3, refuse)
    assert caught.value.rank == culprit
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in refuse" in caught.value.stack
    assert not dist.is_initialized()


def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    wake = threading.Event()

    def stay() -> None:
        if dist.get_rank() == 1:
            wake.wait(30)

    with pytest.raises(RankTimeout, match=r"no answer after 0\.5 s from rank 1\n(.|\n)*in stay"):
        run_threads(2, stay, timeout=0.5)
    wake.set()
    for thread in threading.enumerate():  # it goes on as a daemon, and takes its group down
        if thread.name == "rank-1":
            thread.join(30)
