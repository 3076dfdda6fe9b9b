"""Periodic averaging: against torch's averagers and a simulation, hierarchies, bits, messages, resume."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

from lockstep.extensions.parallel.averaging import ParameterAverager, average
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from tests.tools.pool import RankPool

SHAPES = [(3, 2), (5,), (), (0, 2)]


def _parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


@torch.no_grad()
def _update(parameters: list[nn.Parameter], rank: int, step: int) -> None:
    """An optimizer's step that differs from rank to rank."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    for parameter in parameters:
        parameter.mul_(0.9).add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        parameter.grad = torch.zeros_like(parameter)  # torch's averagers want one


def _run(period: Any, start: int, steps: int, of: str) -> tuple[list[list[Tensor]], list[bool]]:
    rank, parameters = dist.get_rank(), _parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # period 1
        torchs: Any = None
        if of != "ours" and isinstance(period, dict):
            torchs = HierarchicalModelAverager(OrderedDict(period), start)
        elif of != "ours":
            torchs = PeriodicModelAverager(period, start)
    averager = None if of == "torch" else ParameterAverager(parameters, torchs or period, start)
    found, agreed = [], []
    for step in range(steps):
        _update(parameters, rank, step)
        if averager is None:
            torchs.average_parameters(parameters)
        else:
            averager.step()
            agreed.append(averager.agreed)
        found.append([parameter.detach().clone() for parameter in parameters])
    if averager is not None and torchs is not None:
        assert torchs.step == steps
    return found, agreed


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=st.integers(1, 4), period=st.integers(1, 4), start=st.integers(0, 4))
def test_parameters_are_those_of_a_simulation(ranks: RankPool, world: int, period: int, start: int) -> None:
    steps = 8
    results = ranks(world).run(_run, period, start, steps, "ours")
    everyone = [_parameters() for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            _update(everyone[rank], rank, step)
        due = step >= start and (step - start) % period == 0
        if due:
            with torch.no_grad():
                for alike in zip(*everyone, strict=True):
                    mean = torch.stack(list(alike)).mean(dim=0)
                    for parameter in alike:
                        parameter.copy_(mean)
        for rank in range(world):
            found, agreed = results[rank]
            assert agreed[step] == (due or step < start)
            for mine, right, first in zip(found[step], everyone[rank], results[0][0][step], strict=True):
                torch.testing.assert_close(mine, right.detach(), rtol=1e-12, atol=1e-12)
                if due:
                    assert torch.equal(mine, first)  # bitwise


@pytest.mark.parametrize(("period", "start"), [(3, 2), (1, 0), ({2: 2, 4: 4}, 4)])
def test_torchs_averagers_and_their_schedule(ranks: RankPool, period: Any, start: int) -> None:
    world = 4 if isinstance(period, dict) else 2
    theirs, taken, ours = (ranks(world).run(_run, period, start, 9, of) for of in ("torch", "torch in ours", "ours"))
    for results in (taken, ours):
        for mine, right in zip(results, theirs, strict=True):
            for one, other in zip(mine[0], right[0], strict=True):
                for tensor, reference in zip(one, other, strict=True):
                    torch.testing.assert_close(tensor, reference, rtol=1e-12, atol=1e-12)


def _hierarchy() -> list[tuple[float, bool]]:
    parameter = nn.Parameter(torch.zeros(()))
    averager = ParameterAverager([parameter], {2: 2, 6: 4}, start=1)
    found = []
    for step in range(8):
        with torch.no_grad():
            parameter.fill_(float(dist.get_rank() + step))
        averager.step()
        found.append((parameter.item(), averager.agreed))
    return found


def test_a_hierarchy_averages_neighbours_often_and_all_seldom(ranks: RankPool) -> None:
    results = ranks(4).run(_hierarchy)
    for rank, found in enumerate(results):
        pair = rank // 2 * 2 + 0.5
        assert found == [
            (rank + 0, True),  # before the start gradients are averaged
            (1.5 + 1, True),  # distance 0 is a multiple of all periods
            (rank + 2, False),
            (pair + 3, False),
            (rank + 4, False),
            (pair + 5, False),
            (rank + 6, False),
            (1.5 + 7, True),
        ]


def _many_kinds(piece: int) -> tuple[list[Tensor], int, int]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float32]
    tensors = [torch.randn(4, 6, generator=generator, dtype=dtype) for dtype in kinds]
    tensors[4] = torch.randn(6, 4, generator=generator).t()  # strided
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "PIECE", piece)
        return tensors, *average(tensors)


@pytest.mark.parametrize(("piece", "collectives"), [(2**20, 5), (1, 6)])
def test_tensors_of_any_kind_travel_together(ranks: RankPool, piece: int, collectives: int) -> None:
    results = ranks(3).run(_many_kinds, piece)
    before = []
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        kinds = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
        one = [torch.randn(4, 6, generator=generator, dtype=dtype) for dtype in kinds]
        torch.randn(4, 6, generator=generator)
        before.append([*one, torch.randn(6, 4, generator=generator).t()])
    for tensors, messages, sent in results:
        assert messages == collectives
        bf16 = 2 * (24 // 3) * (3 + 1)  # three slices of 8 to all, and one back
        assert sent == 24 * (4 + 8 + 8 + 4) + bf16
        for place, tensor in enumerate(tensors):
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            truth = torch.stack([one[place].to(wide) for one in before]).mean(dim=0)
            loose = 0.02 if tensor.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(tensor.to(wide), truth, rtol=loose, atol=loose)
            assert torch.equal(tensor, results[0][0][place])


def _buffers_and_frozen() -> tuple[float, int, float, float]:
    rank = float(dist.get_rank())
    layer = nn.BatchNorm1d(1)
    layer.running_mean.fill_(rank)  # type: ignore[union-attr]
    layer.num_batches_tracked.fill_(int(rank))  # type: ignore[union-attr, operator]
    frozen = nn.Parameter(torch.full((1,), rank), requires_grad=False)
    thawed = nn.Parameter(torch.full((1,), rank), requires_grad=False)
    averager = ParameterAverager([*layer.parameters(), frozen, thawed], 2, 0, buffers=layer.buffers())
    averager.step()
    thawed.requires_grad_(True)
    averager.step()
    thawed.requires_grad_(False)  # it has been trained meanwhile
    averager.step()
    assert layer.running_mean is not None
    assert layer.num_batches_tracked is not None
    return layer.running_mean.item(), int(layer.num_batches_tracked.item()), frozen.item(), thawed.item()


def test_buffers_along_and_what_was_ever_trained(ranks: RankPool) -> None:
    assert ranks(2).run(_buffers_and_frozen) == [(0.5, 0, 0.0, 0.5), (0.5, 1, 1.0, 0.5)]


def _resumed() -> tuple[list[Tensor], list[Tensor]]:
    def play(averager: ParameterAverager, parameters: list[nn.Parameter], steps: range) -> None:
        for step in steps:
            _update(parameters, dist.get_rank(), step)
            averager.step()

    whole = _parameters()
    play(ParameterAverager(whole, 3, 2), whole, range(10))
    part = _parameters()
    first = ParameterAverager(part, 3, 2)
    play(first, part, range(4))
    second = ParameterAverager(part, 3, 2)
    second.load_state_dict(first.state_dict())
    assert second.agreed == first.agreed
    play(second, part, range(4, 10))
    return whole, part


def test_resumes_bitwise(ranks: RankPool) -> None:
    for whole, part in ranks(2).run(_resumed):
        assert all(torch.equal(one, other) for one, other in zip(whole, part, strict=True))


@pytest.mark.parametrize(
    ("period", "start", "said"),
    [
        (0, 0, "period={0: 1}"),
        (2, -1, "start=-1"),
        ({}, 0, "periods of at least 1 step"),
        ({2: 2}, 0, "the largest period must have all 1"),
        ({2: 1, 4: 2}, 0, "each number of ranks must divide 1"),
        ("4", 0, "period='4'"),
        (True, 0, "period=True"),
    ],
)
def test_settings_that_cannot_be(period: int | Mapping[int, int], start: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        ParameterAverager(_parameters(), period, start)
