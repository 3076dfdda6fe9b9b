"""PowerSGD: against a simulation in float64, exactness at full rank, error feedback, bytes, memory, resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.engines.ddp.reducer import Reducer
from lockstep.extensions.parallel.hooks import PowerSGDState, fp16_wrapper, power_sgd
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from lockstep.extensions.parallel.hooks.hook_transport import attach_hook
from lockstep.ground.errors import MisconfigurationException
from tests.extensions.parallel.hooks.pieces import SHAPES, Model, Shape, as_checkpoint, counted, play, same_on_all
from tests.tools.pool import RankPool

some_shapes = st.lists(st.sampled_from([*SHAPES, (20, 30), (1, 8), (8, 1), (30, 20)]), min_size=0, max_size=5)


def _rounds(cut: list[list[Shape]], settings_: dict[str, Any], steps: int, dtype: torch.dtype) -> list[Tensor]:
    model, state = Model(cut, dtype), PowerSGDState(**settings_)
    found: list[Tensor] = []
    for step in range(steps):
        found += play(power_sgd, state, model.buckets(dist.get_rank(), step))
    assert state.iteration == steps
    return found


class Simulation:
    """Vogels and others' algorithm 1 and 2 for all ranks at once, in float64, one matrix at a time."""

    def __init__(self, world: int, rank: int, feedback: bool, warm: bool, rate: float) -> None:
        self.world, self.rank, self.feedback, self.warm, self.rate = world, rank, feedback, warm, rate
        self.errors: dict[Any, list[Tensor]] = {}
        self.sides: dict[Any, Tensor] = {}

    def mean(self, key: Any, sent: list[Tensor], first: Tensor) -> Tensor:
        rows = sent[0].shape[0] if sent[0].dim() > 1 and sent[0].numel() else 0
        columns = sent[0].numel() // rows if rows else 0
        rank = min(rows, columns, self.rank)
        if not rank or (rows + columns) * rank * self.rate >= rows * columns:
            return torch.stack(sent).mean(dim=0)
        matrices = [one.reshape(rows, columns) for one in sent]
        if self.feedback:
            errors = self.errors.setdefault(key, [torch.zeros_like(one) for one in matrices])
            matrices = [one + error for one, error in zip(matrices, errors, strict=True)]
        q = self.sides.get(key, first) if self.warm else first
        q = torch.linalg.qr(q[:, :rank])[0]
        p = torch.linalg.qr(sum(one @ q for one in matrices) / self.world)[0]
        q = sum(one.T @ p for one in matrices) / self.world
        self.sides[key] = q
        found = p @ q.T
        if self.feedback:
            self.errors[key] = [one - found for one in matrices]
        return found.view(sent[0].shape)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=some_shapes,
    world=st.integers(1, 4),
    rank=st.integers(1, 4),
    rate=st.sampled_from([0.0, 1.0, 2.0]),
    feedback=st.booleans(),
    warm=st.booleans(),
)
def test_the_mean_is_that_of_a_simulation(
    ranks: RankPool, shapes: list[Shape], world: int, rank: int, rate: float, feedback: bool, warm: bool
) -> None:
    cut, steps = [shapes, [(12, 10)]], 3
    options = {"rank": rank, "start": 1, "min_compression_rate": rate, "error_feedback": feedback, "warm_start": warm}
    results = ranks(world).run(_rounds, cut, options, steps, torch.float64)
    assert same_on_all(results)
    simulation = Simulation(world, rank, feedback, warm, rate)
    model = Model(cut, torch.float64)
    for step in range(steps):
        by_rank = [model.buckets(of_rank, step) for of_rank in range(world)]
        for index in range(len(cut)):
            expected = []
            for place in range(len(cut[index])):
                sent = [buckets[index].gradients()[place] for buckets in by_rank]
                if step == 0:
                    expected.append(torch.stack(sent).mean(dim=0))
                    continue
                expected.append(simulation.mean((index, place), sent, _first(step, index, place, sent[0], rank)))
            flat = torch.cat([one.reshape(-1) for one in expected]) if expected else torch.empty(0).double()
            torch.testing.assert_close(results[0][2 * step + index], flat, rtol=1e-7, atol=1e-9)


def _first(step: int, index: int, place: int, gradient: Tensor, rank: int) -> Tensor:
    """The random vectors that the hook begins with: those of its seed, in float32."""
    if gradient.dim() < 2 or not gradient.numel():
        return torch.empty(0)
    rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
    seed = 0
    for number in (step, index, place):
        seed = (seed * 1_000_003 + number + 1) % 2**63
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(columns, min(rank, rows, columns), generator=generator).double()


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (4, 3, 2), (1, 7), (7, 1)])
def test_full_rank_is_exact(ranks: RankPool, shape: Shape) -> None:
    options = {"rank": 10, "start": 0, "min_compression_rate": 0.0}
    (found, *_), again = ranks(2).run(_rounds, [[shape]], options, 1, torch.float64)
    assert torch.equal(found, again[0])
    truth = sum(Model([[shape]], torch.float64).buckets(rank, 0)[0].buffer() for rank in range(2)) / 2
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def _constant(feedback: bool, steps: int) -> float:
    """How far the sum of means is from the sum of gradients that stay the same, relative to one of them."""
    state = PowerSGDState(rank=1, start=0, error_feedback=feedback)
    model = Model([[(30, 30)]])
    total = torch.zeros(900)
    for _ in range(steps):
        (found,) = play(power_sgd, state, model.buckets(dist.get_rank(), 0))
        total += found
    truth = sum(Model([[(30, 30)]]).buckets(rank, 0)[0].buffer() for rank in range(2)) / 2
    return float((total / steps - truth).norm() / truth.norm())


def test_error_feedback_makes_good_what_was_left_out(ranks: RankPool) -> None:
    short, long = (ranks(2).run(_constant, True, steps)[0] for steps in (10, 80))
    without = ranks(2).run(_constant, False, 80)[0]
    assert long < short / 3
    assert long < 0.25
    assert without > 0.8


def _apart(dtype: torch.dtype) -> tuple[list[float], Tensor, Tensor]:
    """Ranks whose gradients have opposite signs but for a part: the rank's errors, what it has paid, what it got."""
    state, model = PowerSGDState(rank=1, start=0, min_compression_rate=0), Model([[(12, 10)]], dtype)
    large = (1 - 2 * dist.get_rank()) * 10 * torch.randn(120, generator=torch.Generator().manual_seed(0))
    paid, got, sizes = torch.zeros(120, dtype=torch.float64), torch.zeros(120, dtype=torch.float64), []
    for step in range(60):
        buckets = model.buckets(dist.get_rank(), step, lambda flat: flat.add_(large.to(dtype)))
        paid += buckets[0].buffer()
        got += play(power_sgd, state, buckets)[0]
        (record,) = state._memory.records(buckets[0])
        sizes.append(float(record["error"].norm()))
    return sizes, paid - record["error"].reshape(-1), got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_do_not_grow_where_the_ranks_data_differ(ranks: RankPool, dtype: torch.dtype) -> None:
    """With the approximated mean taken off every rank's own, they grew by the ranks' difference in every step."""
    (sizes, paid, got), (_, other_paid, _) = ranks(2).run(_apart, dtype)
    assert sizes[59] < 1.5 * sizes[19]
    assert float((got - (paid + other_paid) / 2).norm()) < (1e-3 if dtype is torch.float32 else 1)


def test_a_transposed_parameter_has_its_rank_in_memory() -> None:
    """Its gradient was cut into rows where it has none, and a matrix of rank 1 was none of rank 1."""
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(5, 40).t())
    reducer = Reducer(net.named_parameters())
    attach_hook(reducer, PowerSGDState(rank=1, start=0, min_compression_rate=0), power_sgd)
    reducer.prepare()
    left, right = torch.arange(40.0), torch.arange(1.0, 6.0)
    (left @ net.weight @ right).backward()
    reducer.finish()
    torch.testing.assert_close(net.weight.grad, torch.outer(left, right))


def _wire(shapes: list[Shape]) -> tuple[float, list[str], int, int, int]:
    state = PowerSGDState(rank=2, start=0)
    model = Model([shapes])
    play(power_sgd, state, model.buckets(dist.get_rank(), 0))
    state.numbers = state.numbers_sent = 0
    with counted() as wire:
        play(power_sgd, state, model.buckets(dist.get_rank(), 1))
    return wire.bytes, wire.calls, state.numbers, state.numbers_sent, state.memory_bytes


@pytest.mark.parametrize("world", [3])
def test_m_plus_n_numbers_travel_for_m_times_n(ranks: RankPool, world: int) -> None:
    shapes: list[Shape] = [(40, 50), (16, 3, 5), (33,), (3, 3)]
    loose = 33 + 9  # a vector, and a matrix that would not be smaller
    compressed = (40 + 50) * 2 + (16 + 15) * 2
    for sent, calls, numbers, numbers_sent, memory in ranks(world).run(_wire, shapes):
        assert calls == ["all_reduce", "all_reduce"]
        assert sent == pytest.approx(2 * (world - 1) / world * 4 * (loose + compressed))
        assert (numbers, numbers_sent) == (2000 + 240 + loose, compressed + loose)
        # errors of what is compressed, and Q
        assert memory == 4 * (2000 + 240 + (50 + 15) * 2)


def test_nothing_is_kept_without_feedback_and_warm_start() -> None:
    state = PowerSGDState(rank=2, start=0, error_feedback=False, warm_start=False)
    play(power_sgd, state, Model([[(40, 50)]]).buckets(0, 0))
    assert state.memory_bytes == 0


def _with_infinities(hook_is_wrapped: bool) -> list[Tensor]:
    rank, state, model = dist.get_rank(), PowerSGDState(rank=2, start=0), Model([[(20, 20), (5,)]])
    hook = fp16_wrapper(power_sgd) if hook_is_wrapped else power_sgd
    found = []
    for step in range(4):

        def change(flat: Tensor, step: int = step) -> None:
            if step == 1 and rank == 1:
                flat[7] = torch.inf if not hook_is_wrapped else 1e6  # inf in float16

        found += play(hook, state, model.buckets(rank, step, change))
    return found


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_not_finite_is_seen_on_all_ranks_and_not_remembered(ranks: RankPool, wrapped: bool) -> None:
    """A gradient scaler skips such a step; an error of NaN would stay for ever."""
    results = ranks(2).run(_with_infinities, wrapped)
    assert same_on_all(results)
    before, then, *after = results[0]
    assert bool(before.isfinite().all())
    assert not bool(then[:400].isfinite().all())
    assert bool(then[400:].isfinite().all())
    assert all(bool(one.isfinite().all()) for one in after)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_gradient_comes_back_after_rounds_of_zeros(rank: int) -> None:
    """A layer that was not used: torch's PowerSGD of rank 1 and 2 goes on with a Q of zeros for ever (or of NaN)."""
    state, model = PowerSGDState(rank, start=0, min_compression_rate=0), Model([[(12, 10)]])
    for step in range(3):
        (found,) = play(power_sgd, state, model.buckets(0, step, lambda flat: flat.zero_()))
        assert not found.any()
    for _ in range(3):
        (found,) = play(power_sgd, state, model.buckets(0, 4))
    assert float(found.norm()) > 0.2 * float(model.buckets(0, 4)[0].buffer().norm())


def _resumed(options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    cut: list[list[Shape]] = [[(30, 20), (4,)], [(16, 3, 5)]]
    rank, whole, part = dist.get_rank(), [], []
    model, state, saved = Model(cut), PowerSGDState(**options), None
    for step in range(6):
        if step == 3:
            saved = as_checkpoint(state.state_dict())
        whole += play(power_sgd, state, model.buckets(rank, step))
    model, state = Model(cut), PowerSGDState(**options)
    assert saved is not None
    state.load_state_dict(saved)
    for step in range(3, 6):
        part += play(power_sgd, state, model.buckets(rank, step))
    return whole[6:], part


@pytest.mark.parametrize("options", [{"start": 1}, {"start": 4}, {"start": 0, "warm_start": False, "rank": 3}])
def test_resumes_bitwise(ranks: RankPool, options: dict[str, Any]) -> None:
    for whole, part in ranks(2).run(_resumed, options):
        assert len(whole) == 6
        assert same_on_all([whole, part])


def test_the_memory_follows_parameters_into_other_buckets() -> None:
    state = PowerSGDState(rank=1, start=0)
    two = Model([[(20, 20)], [(30, 10)]])
    play(power_sgd, state, two.buckets(0, 0))
    errors = [state._memory.records(bucket)[0]["error"].clone() for bucket in two.buckets(0, 0)]
    one = Model([[(30, 10), (20, 20)]])
    one.parameters = [[two.parameters[1][0], two.parameters[0][0]]]
    (bucket,) = one.buckets(0, 0)
    found = [record["error"] for record in state._memory.records(bucket)]
    assert torch.equal(found[0], errors[1])
    assert torch.equal(found[1], errors[0])
    assert list(state.state_dict()["memory"]) == [0]


def test_a_state_of_other_buckets_is_refused() -> None:
    state, other = (PowerSGDState(start=0, min_compression_rate=0) for _ in range(2))
    play(power_sgd, state, Model([[(20, 20), (3,)]]).buckets(0, 0))
    other.load_state_dict(state.state_dict())
    (bucket,) = Model([[(20, 20)]]).buckets(0, 0)
    with pytest.raises(ValueError, match=r"2 parameters in bucket 0, which has 1 now.*replan"):
        power_sgd(other, bucket).wait()
    other.load_state_dict(state.state_dict())
    (bucket,) = Model([[(3,), (20, 20)]]).buckets(0, 0)
    with pytest.raises(ValueError, match=r"400 numbers for parameter 0 of bucket 0, but this parameter has 3 now"):
        power_sgd(other, bucket).wait()


def test_channels_last_and_complex_gradients() -> None:
    weight = nn.Parameter(torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last))
    values = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    flat = values.permute(0, 2, 3, 1).reshape(-1).clone()
    before = flat.clone()
    view = flat.as_strided(weight.shape, weight.stride())
    state = PowerSGDState(rank=8, start=0, min_compression_rate=0)
    (found,) = play(power_sgd, state, [GradBucket(0, flat, [view], [weight], True)])
    torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-5)
    state = PowerSGDState(rank=6, start=0, min_compression_rate=0)
    model = Model([[(6, 5)]], torch.complex64)
    (found,) = play(power_sgd, state, model.buckets(0, 0))
    torch.testing.assert_close(found, model.buckets(0, 0)[0].buffer(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [{"rank": 0}, {"rank": 1.5}, {"start": -1}, {"min_compression_rate": -1.0}])
def test_settings_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=f"{next(iter(bad))}={next(iter(bad.values()))}"):
        PowerSGDState(**bad)
