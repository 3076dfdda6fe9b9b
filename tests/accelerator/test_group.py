"""Collectives of the made-up device return when they are queued; the group carries what it says, and plays faults."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from tests.accelerator.on_device import on_device
from tests.tools.pool import RankFailure, RankPool

BOTH = "cpu:gloo,madeup:madeupccl"


def _meet(backend: str = "madeupccl") -> int:
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    return rank


def _of(*values: float) -> Tensor:
    return torch.tensor(values).to("madeup", non_blocking=True)


@on_device(2)
def test_a_collective_returns_when_it_is_queued() -> None:
    from tests.accelerator.madeup import queues

    rank = _meet()
    go_on = queues.block() if rank == 1 else lambda: None
    with queues.watched_waits() as waits:
        values = _of(rank + 1.0)
        dist.all_reduce(values)
        later = values * 2
        work = dist.all_reduce(later, async_op=True)
        assert work is not None
        assert rank == 0 or not work.is_completed()  # rank 0's ends as soon as rank 1 has gone on
        work.wait()
        last = later + 1
    assert not waits
    go_on()
    assert (values.item(), last.item()) == (3.0, 13.0)
    assert work.is_completed()


@on_device(2)
def test_a_group_for_both_carries_both() -> None:
    from tests.accelerator.madeup import having, queues

    rank = _meet(BOTH)
    group = dist.new_group([0, 1])
    for each in (None, group):
        there, here = _of(1.0), torch.ones(1)
        with queues.watched_waits() as waits:
            dist.all_reduce(here, group=each)
        assert not waits
        dist.all_reduce(there, group=each)
        assert (here.item(), there.item()) == (2.0, 2.0)
    with having(takes_cpu=0), pytest.raises(RuntimeError, match="device type cpu"):
        dist.all_reduce(torch.ones(1))
    assert dist.get_rank(group) == rank
    dist.barrier()


@on_device(2)
def test_messages_go_by_themselves() -> None:
    from tests.accelerator.madeup import queues

    rank = _meet()
    stuck = torch.get_device_module("madeup").Stream()
    values = _of(0.0)
    if rank == 0:
        with torch.get_device_module("madeup").stream(stuck):  # a collective that cannot begin
            go_on = queues.block()
            held = dist.all_reduce(values, async_op=True)
        dist.send(_of(7.0), 1)
        back = _of(0.0)
        dist.recv(back, 1)
        assert back.item() == 8.0
        assert held is not None
        assert not held.is_completed()
        go_on()
    else:
        got = _of(0.0)
        dist.recv(got, 0)
        dist.send(got + 1, 0)
        torch.accelerator.synchronize()
        held = dist.all_reduce(values, async_op=True)
    assert held is not None
    held.wait()
    assert values.item() == 0.0


@on_device(2)
def test_tensors_that_are_on_the_cpu_on_one_rank_alone_travel_by_one_backend() -> None:
    """After a pipeline each rank gets others' blocks on the CPU, which their owner has on its device: it sent them
    by the device's backend, and the others waited at gloo, without end."""
    rank = _meet(BOTH)
    tensors = [
        torch.full((3,), rank + number, dtype=dtype) for number, dtype in enumerate((torch.int32, torch.float64))
    ]
    if rank == 0:
        tensors = [each.to("madeup") for each in tensors]
    tensors.append(torch.full((1,), rank + 5.0, device="madeup"))
    comm.broadcast_tensors(tensors, 0, over=torch.device("madeup", rank))
    assert [each.tolist() for each in tensors] == [[0, 0, 0], [1.0, 1.0, 1.0], [5.0]]
    assert {each.device.type for each in tensors[:2]} == {"madeup" if rank == 0 else "cpu"}


def _lost(ends: int) -> None:
    """Rank 1 leaves: rank 0's collective fails by itself, or not before its group is aborted."""
    from tests.accelerator.madeup import having

    rank = _meet()
    dist.all_reduce(_of(1.0))
    torch.accelerator.synchronize()
    if rank == 1:
        os._exit(3)
    with having(lost_ranks_end=ends):
        values = _of(1.0)
        aborted = threading.Event()

        def abort() -> None:
            aborted.set()
            dist.distributed_c10d._abort_process_group()

        dist.all_reduce(values)
        # one that ends by itself has longer than the whole test may take
        waiting = threading.Timer(60.0 if ends else 1.0, abort)
        waiting.start()
        with pytest.raises(RuntimeError, match="queued work has failed"):
            values.item()
        assert aborted.is_set() is not bool(ends)
        waiting.cancel()
        waiting.join()
    raise ValueError("this rank saw it")


@pytest.mark.parametrize("ends", [0, 1])
def test_a_collective_of_a_lost_rank_never_ends_or_fails(madeup: RankPool, ends: int) -> None:
    with pytest.raises(RankFailure) as caught:
        madeup(2).run(_lost, ends, group=False, timeout=20)
    assert "exit status 3" in str(caught.value)
    assert "this rank saw it" in str(caught.value)
    assert "AssertionError" not in str(caught.value)
