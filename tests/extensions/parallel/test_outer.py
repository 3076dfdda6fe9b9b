"""The outer optimizer (DiLoCo): against a simulation of all ranks, plain averaging, resume, compression."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.extensions.parallel.averaging import OuterOptimizer, ParameterAverager
from lockstep.ground.errors import MisconfigurationException
from tests.tools.pool import RankPool

SHAPES = [(6, 4), (5,), ()]


def _parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


@torch.no_grad()
def _inner(parameters: list[nn.Parameter], rank: int, step: int) -> None:
    """A step of an inner optimizer towards a point of the rank's own."""
    generator = torch.Generator().manual_seed(50 * rank + step)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.add_(rank + 1.0 - parameter, alpha=0.05).add_(noise, alpha=0.01)


def _run(options: dict[str, Any], steps: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], int, int]:
    parameters = _parameters(dtype)
    outer = OuterOptimizer(parameters, **options)
    for step in range(steps):
        # before the start all ranks step alike
        _inner(parameters, 0 if step < options.get("start", 0) else dist.get_rank(), step)
        taken = outer.step()
        local = step + 1 - options.get("start", 0)
        assert taken == (local > 0 and local % options["period"] == 0)
        assert outer.agreed == (local <= 0 or taken)
    return [parameter.detach().clone() for parameter in parameters], outer.collectives, outer.bytes


def _simulated(world: int, period: int, start: int, steps: int, lr: float, momentum: float) -> list[Tensor]:
    """Douillard and others, algorithm 1, with Nesterov's momentum as PyTorch has it."""
    everyone = [_parameters() for _ in range(world)]
    begun: list[Tensor] = [p.detach().clone() for p in everyone[0]]
    speed: list[Tensor | None] = [None] * len(begun)
    for step in range(steps):
        for rank, parameters in enumerate(everyone):
            _inner(parameters, 0 if step < start else rank, step)
        local = step + 1 - start
        if local <= 0:
            begun = [p.detach().clone() for p in everyone[0]]
        elif local % period == 0:
            for place in range(len(begun)):
                mean = torch.stack([parameters[place].detach() for parameters in everyone]).mean(dim=0)
                gradient = begun[place] - mean
                before = speed[place]
                now = gradient if before is None else momentum * before + gradient
                speed[place] = now
                begun[place] = begun[place] - lr * (gradient + momentum * now)
                for parameters in everyone:
                    parameters[place].data.copy_(begun[place])
    return begun


@pytest.mark.everyday
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("period", "start"), [(4, 0), (3, 5), (1, 2)])
def test_outer_steps_are_those_of_a_simulation(ranks: RankPool, world: int, period: int, start: int) -> None:
    steps = start + 3 * period
    results = ranks(world).run(_run, {"period": period, "start": start}, steps)
    expected = _simulated(world, period, start, steps, 0.7, 0.9)
    for found, collectives, sent in results:
        assert (collectives, sent) == ((3, 3 * 8 * 30) if world > 1 else (0, 0))
        for mine, right, first in zip(found, expected, results[0][0], strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)
            assert torch.equal(mine, first)


def _averaged() -> tuple[list[Tensor], list[Tensor]]:
    one, other = _parameters(), _parameters()
    outer = OuterOptimizer(one, 3, lr=1.0, momentum=0.0, nesterov=True)
    averager = ParameterAverager(other, 3, start=2)  # after steps 2, 5, ..., counted from 0
    for step in range(6):
        for parameters in (one, other):
            _inner(parameters, dist.get_rank(), step)
        outer.step()
        averager.step()
    return [p.detach() for p in one], [p.detach() for p in other]


def test_a_learning_rate_of_1_without_momentum_is_plain_averaging(ranks: RankPool) -> None:
    for one, other in ranks(2).run(_averaged):
        for tensor, reference in zip(one, other, strict=True):
            torch.testing.assert_close(tensor, reference, rtol=1e-12, atol=1e-12)


def _resumed(saved_at: int, start: int) -> tuple[list[Tensor], list[Tensor]]:
    def play(parameters: list[nn.Parameter], outer: OuterOptimizer, steps: range) -> None:
        for step in steps:
            _inner(parameters, 0 if step < start else dist.get_rank(), step)
            outer.step()

    whole, part = _parameters(), _parameters()
    play(whole, OuterOptimizer(whole, 3, start), range(14))
    first = OuterOptimizer(part, 3, start)
    play(part, first, range(saved_at))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = OuterOptimizer(part, 3, start)
    second.load_state_dict(torch.load(file, weights_only=True))
    play(part, second, range(saved_at, 14))
    return whole, part


@pytest.mark.parametrize(("saved_at", "start"), [(2, 4), (4, 4), (9, 4), (3, 0), (5, 0)])
def test_resumes_bitwise(ranks: RankPool, saved_at: int, start: int) -> None:
    for whole, part in ranks(2).run(_resumed, saved_at, start):
        assert all(torch.equal(one, other) for one, other in zip(whole, part, strict=True))


@pytest.mark.parametrize(("compression", "loose"), [("fp16", 1e-3), ("bf16", 6e-3)])
def test_differences_may_travel_compressed(ranks: RankPool, compression: str, loose: float) -> None:
    results = ranks(2).run(_run, {"period": 4, "compression": compression}, 4, torch.float32)
    expected = _simulated(2, 4, 0, 4, 0.7, 0.9)
    for found, collectives, sent in results:
        assert collectives == 2
        assert sent == 30 * 2 * 1.5  # cut in two: one message of both slices and one of a slice
        for mine, right, first in zip(found, expected, results[0][0], strict=True):
            assert torch.equal(mine, first)
            assert float((mine - right).abs().max()) < loose


def _narrow() -> list[Tensor]:
    parameters = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    outer = OuterOptimizer(parameters, 1, lr=1.0, momentum=0.0)
    for _ in range(4):
        with torch.no_grad():
            parameters[0].add_(0.25 * dist.get_rank())
        outer.step()
    assert outer.optimizer is not None
    (begun,) = outer.optimizer.param_groups[0]["params"]
    assert begun.dtype == torch.float32
    return [parameters[0].detach().float()]


def test_16_bit_parameters_begin_from_float32(ranks: RankPool) -> None:
    for (found,) in ranks(2).run(_narrow):
        assert found.tolist() == [1.5] * 3


def test_another_outer_optimizer() -> None:
    parameters = _parameters()
    outer = OuterOptimizer(parameters, 1, optimizer=lambda begun: torch.optim.Adam(begun, lr=0.1))
    before = parameters[1].detach().clone()
    with torch.no_grad():
        parameters[1].sub_(1.0)
    outer.step()
    torch.testing.assert_close(parameters[1].detach(), before - 0.1)
    assert isinstance(outer.optimizer, torch.optim.Adam)


def test_buffers_are_averaged_with_each_outer_step(ranks: RankPool) -> None:
    assert ranks(2).run(_with_buffers) == [(0.5, 0), (0.5, 1)]


def _with_buffers() -> tuple[float, int]:
    mean, count = torch.tensor(float(dist.get_rank())), torch.tensor(dist.get_rank())
    OuterOptimizer(_parameters(), 1, buffers=[mean, count]).step()
    return mean.item(), int(count)


def test_a_state_of_another_model_is_refused() -> None:
    state = OuterOptimizer(_parameters(), 2).state_dict()
    with pytest.raises(ValueError, match="3 parameters, but the model has 1"):
        OuterOptimizer(_parameters()[:1], 2).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"period": 0}, "period=0"),
        ({"period": 2.5}, "period=2.5"),
        ({"period": 2, "start": -1}, "start=-1"),
        ({"period": 2, "compression": "int8"}, 'compression=\'int8\'.*choose "fp16", "bf16"'),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        OuterOptimizer(_parameters(), **options)
