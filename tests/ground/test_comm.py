"""Collectives: values against plain arithmetic, on processes and without a process group."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lockstep.ground import comm
from lockstep.supervise.collective_trace import install_trace, uninstall_trace
from tests.tools.pool import RankPool

NAMES = ("float32", "float64", "bfloat16", "complex64", "int64", "int16", "uint8", "bool")
DTYPES = [getattr(torch, name) for name in NAMES]


def _of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + 3 * rank).to(dtype)


def _reductions() -> dict[str, Any]:
    rank = dist.get_rank()
    strided = (torch.arange(16.0).reshape(4, 4) + rank)[:, ::2]
    before = strided.clone()
    holed = torch.tensor([1.0, torch.nan if rank == 1 else 2.0, float(rank)])
    found: dict[str, Any] = {op: comm.all_reduce(strided, op) for op in ("sum", "mean", "min", "max")}
    found["untouched"] = torch.equal(strided, before)
    found["nan"] = {op: comm.all_reduce(holed, op) for op in ("min", "max")}
    found["whole mean"] = comm.all_reduce(torch.tensor([rank, 1]), "mean")
    found["bool"] = comm.all_reduce(torch.tensor([rank == 1, False]), "max")
    return found


def test_all_reduce_of_strided_views_nan_and_whole_numbers(ranks: RankPool) -> None:
    grid = torch.arange(16.0).reshape(4, 4)[:, ::2]
    for found in ranks(3).run(_reductions):
        assert torch.equal(found["sum"], 3 * grid + 3)
        assert torch.equal(found["mean"], grid + 1)
        assert torch.equal(found["min"], grid)
        assert torch.equal(found["max"], grid + 2)
        assert found["untouched"]
        assert found["nan"]["max"][1].isnan()
        assert found["nan"]["min"][1].isnan()
        assert found["nan"]["max"][[0, 2]].tolist() == [1, 2]
        assert found["nan"]["min"][[0, 2]].tolist() == [1, 0]
        assert found["whole mean"].tolist() == [1.0, 1.0]
        assert found["bool"].tolist() == [True, False]


def _gathers() -> list[Any]:
    rank = dist.get_rank()
    even = [comm.all_gather_tensor(_of_rank(rank, dtype)) for dtype in DTYPES]
    scalar = comm.all_gather_tensor(torch.tensor(float(rank)))
    strided = comm.all_gather_tensor(_of_rank(rank, torch.float32).t())
    single = comm.all_gather_tensor(torch.arange(6.0).reshape(2, 3)[1:, rank])
    assert single.flatten().tolist() == [3.0, 4.0, 5.0], "one element whose stride is 3 could not travel"
    nothing = comm.all_gather_tensor(torch.zeros(0, 2))
    uneven = comm.all_gather_uneven(torch.full((2 * rank, 3), float(rank)))
    objects = comm.all_gather_object({"rank": rank})
    return [even, scalar, strided, nothing.shape, uneven, objects, comm.broadcast_object(rank, src=1)]


def test_gathers(ranks: RankPool) -> None:
    for even, scalar, strided, nothing, uneven, objects, told in ranks(3).run(_gathers):
        for dtype, gathered in zip(DTYPES, even, strict=True):
            assert torch.equal(gathered, torch.stack([_of_rank(rank, dtype) for rank in range(3)]))
        assert scalar.tolist() == [0, 1, 2]
        assert torch.equal(strided[2], _of_rank(2, torch.float32).t())
        assert nothing == (3, 0, 2)
        assert [part.shape[0] for part in uneven] == [0, 2, 4]
        assert torch.equal(uneven[2], torch.full((4, 3), 2.0))
        assert objects == [{"rank": rank} for rank in range(3)]
        assert told == 1


def _in_order(rows: torch.Tensor) -> torch.Tensor:
    """Sums whose bits depend on the order."""
    total = rows[..., 0, :]
    for number in range(1, rows.shape[-2]):
        total = total + rows[..., number, :]
    return total


def _combine(traced: bool) -> tuple[list[float], list[float], list[str]]:
    calls: list[str] = []
    if traced:
        install_trace()
    mine = torch.tensor([0.1, 1e16, -1 / 3], dtype=torch.float64) * (dist.get_rank() + 1) * (-1) ** dist.get_rank()
    try:
        with patch.object(dist, "all_gather", side_effect=lambda *_: calls.append("all_gather")):
            found = comm.combined(mine, _in_order)
    finally:
        if traced:
            uninstall_trace()
    rows = comm.all_gather_tensor(mine)
    expected = _in_order(torch.stack([_in_order(part) for part in rows.split(8)])) if len(rows) > 8 else rows
    return found.tolist(), expected.tolist(), calls


@pytest.mark.parametrize("traced", [False, True])
def test_many_ranks_combine_by_eights_whoever_comes_first(ranks: RankPool, traced: bool) -> None:
    for found, expected, calls in ranks(10).run(_combine, traced):
        assert found == expected
        assert calls == []  # nobody gets everybody's


def _gathered_gradient() -> torch.Tensor:
    rank = dist.get_rank()
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    weights = torch.arange(4.0).reshape(2, 2) + 10 * rank
    (comm.all_gather_with_grad(tensor) * weights).sum().backward()
    assert tensor.grad is not None
    return tensor.grad


def test_backward_through_a_gather_sums_over_ranks(ranks: RankPool) -> None:
    total = torch.arange(4.0).reshape(2, 2) * 2 + 10
    for rank, grad in enumerate(ranks(2).run(_gathered_gradient)):
        assert torch.equal(grad, total[rank])


def _broadcast(limit: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    comm.BROADCAST_BYTES, before = limit, comm.BROADCAST_BYTES
    tensors = [_of_rank(rank, dtype) for dtype in DTYPES]
    tensors += [torch.tensor(rank), torch.zeros(0), torch.full((4, 4), float(rank))[:, ::2]]
    comm.broadcast_tensors(tensors, src=1)
    comm.BROADCAST_BYTES = before
    return tensors


@pytest.mark.parametrize("limit", [1, 40, 2**20])
def test_broadcast_of_many_dtypes_in_pieces_of_any_size(ranks: RankPool, limit: int) -> None:
    expected = [_of_rank(1, dtype) for dtype in DTYPES] + [torch.tensor(1), torch.zeros(0), torch.ones(4, 2)]
    for tensors in ranks(2).run(_broadcast, limit):
        for tensor, right in zip(tensors, expected, strict=True):
            assert tensor.dtype == right.dtype
            assert torch.equal(tensor, right)


def test_without_a_process_group_one_rank_answers() -> None:
    tensor = torch.arange(3.0)
    assert not comm.is_distributed()
    assert (comm.world_size(), comm.rank()) == (1, 0)
    for op in ("sum", "mean", "min", "max"):
        result = comm.all_reduce(tensor, op)  # type: ignore[arg-type]
        assert torch.equal(result, tensor)
        assert result is not tensor
    assert comm.all_reduce(torch.tensor([1, 2]), "mean").is_floating_point()
    assert torch.equal(comm.all_gather_tensor(tensor), tensor.unsqueeze(0))
    assert torch.equal(comm.all_gather_with_grad(tensor), tensor.unsqueeze(0))
    assert [part.tolist() for part in comm.all_gather_uneven(tensor)] == [[0, 1, 2]]
    assert comm.all_gather_object("x") == ["x"]
    assert comm.broadcast_object("x") == "x"
    comm.broadcast_tensors([tensor])
    comm.barrier()


def _rows_to_come() -> list[Any]:
    rank, found = float(dist.get_rank()), []
    for number in range(5):
        rows = comm.RowExchange([rank, 10 * number + rank])
        dist.all_reduce(torch.ones(1))  # the reduction of a window
        found.append(rows.read())
    comm.RowExchange([rank]).send_only()
    return [*found, comm.RowExchange([rank], alone=True).read()]


def test_rows_are_told_now_and_read_later(ranks: RankPool) -> None:
    for rank, (*found, alone) in enumerate(ranks(3).run(_rows_to_come)):
        assert found == [[[float(each), 10.0 * number + each] for each in range(3)] for number in range(5)]
        assert alone == [[float(rank)]]


def _by_way_of_gpus() -> tuple[list[str], torch.device]:
    used: list[str] = []

    class OnGpu(contextlib.nullcontext[None]):
        def __init__(self, device: Any) -> None:
            super().__init__()
            used.append(str(device))

    with patch.object(torch.cuda, "device", OnGpu):
        comm.travel_by(torch.device("cpu"))
        comm.all_gather_object(1)
        comm.travel_by(torch.device("cuda", dist.get_rank()))
        comm.all_gather_object(1)
        comm.broadcast_object(1)
    with patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"):
        return used, comm.carrier(None, torch.device("cpu"))


def test_objects_travel_by_the_models_gpu(ranks: RankPool) -> None:
    """They took the current one, which is GPU 0 on all ranks where nobody calls `torch.cuda.set_device`."""
    for rank, (used, carrier) in enumerate(ranks(2).run(_by_way_of_gpus)):
        assert used == [f"cuda:{rank}"] * 2
        assert carrier == torch.device("cuda", rank)


@pytest.mark.parametrize(
    ("backends", "preferred", "by"),
    [
        ("cpu:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("xpu:xccl", "cpu", "xpu:3"),
        ("xpu:xccl", "xpu:2", "xpu:2"),
        ("cpu:gloo,cuda:gloo", "xpu:1", "cpu"),  # by the CPU, where the group has nothing for the device
    ],
)
def test_a_group_of_any_device_has_a_carrier(
    backends: str, preferred: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group without CUDA said that it carries CPU tensors, and no ddp ran on a device that is neither."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(comm, "_found", lambda group: monkeypatch)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 3)
    assert comm.carrier(None, torch.device(preferred)) == torch.device(by)


def test_an_accelerator_of_any_kind_is_what_cpu_tensors_travel_by(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Process()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "xpu:xccl")
    monkeypatch.setattr(comm, "_found", lambda _: group)
    comm.travel_by(torch.device("xpu", 1))
    assert comm.carrier(None, torch.device("cpu")) == torch.device("xpu", 1)


class Process:
    """In the place of a process group."""
