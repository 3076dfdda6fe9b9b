"""Collectives of the made-up device return when they are queued; the group carries what it says, and plays faults."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
        assert not work.is_completed()
        work.wait()
        last = later + 1
    assert not waits
    go_on()
    assert (values.item(), last.item()) == (3.0, 13.0)
    assert work.is_completed()


@on_device(2)
def test_every_collective_does_what_it_does_on_the_cpu() -> None:
    rank = _meet()
    one, two = _of(float(rank)), _of(4.0 * rank, 4.0 * rank + 1)
    out, parts = torch.empty(2, device="madeup"), [torch.empty(1, device="madeup") for _ in range(2)]
    found: dict[str, Any] = {}

    def note(name: str, value: Tensor | list[Tensor]) -> None:
        found[name] = value.tolist() if isinstance(value, Tensor) else torch.cat(value).tolist()

    dist.all_gather(parts, one)
    note("all_gather", parts)
    dist._all_gather_base(out, one)  # all_gather_into_tensor, by the name that all releases have
    note("all_gather_into_tensor", out)
    half = torch.empty(1, device="madeup")
    dist._reduce_scatter_base(half, two, op=dist.ReduceOp.SUM)
    note("reduce_scatter_tensor", half)
    dist.reduce_scatter(half, list(two.split(1)), op=dist.ReduceOp.MAX)
    note("reduce_scatter", half)
    dist.all_to_all_single(out, two)
    note("all_to_all_single", out)
    if torch.__version__ >= "2.12":  # gloo has none before
        dist.all_to_all(parts, list(two.split(1)))
        note("all_to_all", parts)
    given = two.clone()
    dist.broadcast(given, 1)
    note("broadcast", given)
    dist.reduce(given, 0)
    note("reduce", given) if rank == 0 else None
    dist.gather(one, parts if rank == 0 else None, 0)
    note("gather", parts) if rank == 0 else None
    dist.scatter(half, list(two.split(1)) if rank == 1 else None, 1)
    note("scatter", half)
    mean = one.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    note("mean", mean)
    expected = {
        "all_gather": [0.0, 1.0],
        "all_gather_into_tensor": [0.0, 1.0],
        "reduce_scatter_tensor": [[4.0], [6.0]][rank],
        "reduce_scatter": [[4.0], [5.0]][rank],
        "all_to_all_single": [[0.0, 4.0], [1.0, 5.0]][rank],
        "all_to_all": [[0.0, 4.0], [1.0, 5.0]][rank],
        "broadcast": [4.0, 5.0],
        **({"reduce": [8.0, 10.0], "gather": [0.0, 1.0]} if rank == 0 else {}),
        "scatter": [[4.0], [5.0]][rank],
        "mean": [0.5],
    }
    assert found == expected
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()


@on_device(2)
def test_the_group_alone_carries_this_device_only() -> None:
    _meet()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    dist.barrier()


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
def test_a_barrier_stops_the_host() -> None:
    from tests.accelerator.madeup import queues

    rank = _meet()
    dist.barrier()
    begun = time.monotonic()
    if rank == 1:
        time.sleep(0.1)
    with queues.watched_waits() as waits:
        dist.barrier()
    assert [each[0] for each in waits] == ["barrier"]
    assert time.monotonic() - begun > 0.09


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


@on_device(2)
def test_torchs_ddp_trains_on_it() -> None:
    rank = _meet()
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    alone = nn.Linear(3, 2).double()
    alone.load_state_dict(net.state_dict())
    rows = torch.randn(8, 3, dtype=torch.float64)
    ddp = nn.parallel.DistributedDataParallel(net.to(f"madeup:{rank}"))
    ddp(rows[rank::2].to(f"madeup:{rank}")).pow(2).mean().backward()
    alone(rows).pow(2).mean().backward()
    assert net.weight.grad is not None
    torch.testing.assert_close(net.weight.grad.cpu(), alone.weight.grad, rtol=1e-12, atol=1e-12)


@on_device(2)
def test_torchs_fsdp_trains_on_it() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = _meet(BOTH)
    torch.manual_seed(0)
    net, alone = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double() for _ in range(2))
    alone.load_state_dict(net.state_dict())
    rows = torch.randn(8, 3, dtype=torch.float64)
    net.to(f"madeup:{rank}")
    fully_shard(net, mesh=init_device_mesh("madeup", (2,)))
    for module, batch in ((net, rows[rank::2].to(f"madeup:{rank}")), (alone, rows)):
        module(batch).pow(2).mean().backward()
    for mine, its in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor().cpu(), its.grad, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]
