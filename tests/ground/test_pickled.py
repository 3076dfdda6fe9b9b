"""Objects for other ranks: their tensors arrive on the CPU, whatever device they were on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from lockstep.engines import collectives
from lockstep.engines.collectives import gather_on_zero
from lockstep.ground import comm
from lockstep.ground.comm import packed, unpacked
from tests.tools.pool import RankPool


def metric() -> SimpleNamespace:
    """Has a tensor that no container shows."""
    return SimpleNamespace(total=torch.tensor([1.0, 2.0]))


def _far() -> pytest.MonkeyPatch:
    """Takes this process's tensors for a device's: what comes to the CPU is one more."""
    patch, own = pytest.MonkeyPatch(), comm.on_host

    def on_host(value: torch.Tensor) -> torch.Tensor:
        moved = own(value)
        moved.data = moved.detach() + 1
        return moved

    patch.setattr(comm, "_HOSTS", ())
    for module in (comm, collectives):
        patch.setattr(module, "on_host", on_host)
    return patch


def test_tensors_of_a_device_are_pickled_on_the_cpu() -> None:
    """Unpickled on their device's number they lay on the sender's, and a context of that device with them."""
    patch = _far()
    try:
        data = packed(
            {"metric": metric(), "weight": Parameter(torch.zeros(2)), "frozen": Parameter(torch.ones(1), False)}
        )
    finally:
        patch.undo()
    found = unpacked(data)
    assert found["metric"].total.tolist() == [2.0, 3.0]
    assert isinstance(found["weight"], Parameter)
    assert found["weight"].requires_grad
    assert not found["frozen"].requires_grad
    assert unpacked(packed(metric())).total.tolist() == [1.0, 2.0]  # on the CPU it stays as it is


def _sent() -> list[Any]:
    rank = dist.get_rank()
    patch = _far()
    try:
        mine = {"rank": rank, "metric": metric(), "state": torch.tensor([float(rank)])}
        found = [
            comm.all_gather_object(mine)[1 - rank],
            comm.broadcast_object(mine, 1),
            (comm.gather_objects(mine) or [None, None])[1],
            comm.scatter_objects([mine, mine]),
            (gather_on_zero(mine) or [None, None])[1],
        ]
    finally:
        patch.undo()
    return [each and (each["metric"].total.tolist(), each["state"].tolist()) for each in found]


def test_every_way_of_an_object_brings_its_tensors_to_the_cpu(ranks: RankPool) -> None:
    """At the first checkpoint of a run on GPUs rank 0 got torchmetrics' states on the GPUs of all ranks."""
    zero, one = ranks(2).run(_sent)
    of_zero, of_one = ([2.0, 3.0], [1.0]), ([2.0, 3.0], [2.0])
    assert zero == [of_one, of_one, of_one, of_zero, of_one]
    assert one[1] == ([1.0, 2.0], [1.0])  # its own object
    assert [*one[:1], *one[2:]] == [of_zero, None, of_zero, None]
