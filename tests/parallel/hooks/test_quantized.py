"""int8: values against one process, error feedback, bytes, resume, what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.parallel.hooks import Int8State, PowerSGDState, allreduce, int8
from lockstep.parallel.hooks.compress import Bytes
from lockstep.testing.pool import RankPool
from tests.parallel.hooks.pieces import SHAPES, Model, Shape, as_checkpoint, counted, play, same_on_all

CHUNK = 256
some_shapes = st.lists(st.sampled_from([*SHAPES, (3, 200), (257,)]), min_size=0, max_size=5)


def _quantized(values: Tensor) -> Tensor:
    """What one rank's slice becomes, in float32, chunk by chunk."""
    found = values.clone()
    for start in range(0, len(values), CHUNK):
        chunk = values[start : start + CHUNK]
        scale = chunk.abs().max() / 127
        if scale > 0:
            found[start : start + CHUNK] = (chunk / scale).round().clamp(-127, 127) * scale
    return found


def _mean(sent: list[Tensor], errors: list[Tensor] | None) -> Tensor:
    """The hook's mean of the ranks' buffers, in one process; ``errors`` are updated."""
    world, length = len(sent), sent[0].numel()
    if length == 0:
        return sent[0]
    numbers = -(-length // world)
    lacking = numbers * world - length
    given = [s + e for s, e in zip(sent, errors, strict=True)] if errors else sent
    rows = [torch.nn.functional.pad(values, (0, lacking)).view(world, numbers) for values in given]
    result = torch.empty(world, numbers)
    owed = [torch.zeros(world, numbers) for _ in range(world)]
    for slice_ in range(world):
        total = torch.zeros(numbers)
        for rank in range(world):
            decoded = _quantized(rows[rank][slice_])
            owed[rank][slice_] += rows[rank][slice_] - decoded
            total = total + decoded
        total = total * (1 / world)
        result[slice_] = _quantized(total)
        owed[slice_][slice_] += (total - result[slice_]) * world
    if errors:
        for error, of_rank in zip(errors, owed, strict=True):
            error.copy_(of_rank.view(-1)[:length])
    return result.view(-1)[:length]


def _rounds(cut: list[list[Shape]], feedback: bool, steps: int) -> list[Tensor]:
    model, state = Model(cut), Int8State(error_feedback=feedback)
    found: list[Tensor] = []
    for step in range(steps):
        found += play(int8, state, model.buckets(dist.get_rank(), step))
    return found


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=some_shapes, world=st.integers(1, 4), feedback=st.booleans())
def test_the_mean_is_that_of_one_process(ranks: RankPool, shapes: list[Shape], world: int, feedback: bool) -> None:
    results = ranks(world).run(_rounds, [shapes, [(5,)]], feedback, 3)
    assert same_on_all(results)
    model = Model([shapes, [(5,)]])
    errors = [[torch.zeros_like(b.buffer()) for b in model.buckets(0, 0)] for _ in range(world)]
    for step in range(3):
        by_rank = [model.buckets(rank, step) for rank in range(world)]
        for index in range(2):
            sent = [buckets[index].buffer() for buckets in by_rank]
            expected = _mean(sent, [of_rank[index] for of_rank in errors] if feedback else None)
            found = results[0][2 * step + index]
            # a number on the edge between two multiples may go to either
            largest = max((float(one.abs().max()) for one in sent if one.numel()), default=0.0)
            if not feedback or step == 0:
                assert float((found - expected).abs().max() if found.numel() else 0.0) <= largest / 60
                close = (found - expected).abs() <= 1e-5 * largest
                assert int((~close).sum()) <= 1
            truth = torch.stack(sent).double().mean(dim=0)
            assert float((found - truth).abs().max() if found.numel() else 0.0) <= largest / 25


def test_nothing_is_lost_with_error_feedback(ranks: RankPool) -> None:
    """The sum of all means so far is off by what is owed now: a bound that does not grow with the steps."""
    steps, cut = 60, [[(30, 20), (7,)]]
    truth = torch.zeros(607, dtype=torch.float64)
    for step in range(steps):
        for rank in range(2):
            truth += Model(cut).buckets(rank, step)[0].buffer().double() / 2
    off = {}
    for feedback in (True, False):
        found = ranks(2).run(_rounds, cut, feedback, steps)[0]
        off[feedback] = float((torch.stack(found).double().sum(dim=0) - truth).abs().max())
    one_rounding = 4.5 / 254  # of the largest number in a chunk of normal ones
    assert off[True] < 3 * one_rounding
    assert off[False] > 2 * off[True]


def _sent(hook: Any, shape: Shape) -> tuple[float, list[str]]:
    state = Int8State() if hook is int8 else None
    model = Model([[shape]])
    play(hook, state, model.buckets(dist.get_rank(), 0))
    with counted() as wire:
        play(hook, state, model.buckets(dist.get_rank(), 1))
    return wire.bytes, wire.calls


@pytest.mark.parametrize("world", [3])
def test_a_quarter_of_the_bytes_goes_over_the_wire(ranks: RankPool, world: int) -> None:
    (sent, calls), (plain, _) = (ranks(world).run(_sent, hook, (1024, 20))[0] for hook in (int8, allreduce))
    assert sent == pytest.approx(plain * (1 + 4 / CHUNK) / 4, rel=1e-3)  # each slice fills up its last chunk
    assert len(calls) == 2


def _with_infinities(state: Int8State | None) -> list[list[Tensor]]:
    rank, model = dist.get_rank(), Model([[(600,)]])

    def change(flat: Tensor) -> None:
        if rank == 1:
            flat[3], flat[310] = torch.inf, torch.nan

    return [play(int8, state, model.buckets(rank, step, change if step == 1 else None)) for step in range(4)]


@pytest.mark.parametrize("state", [None, Int8State()])
def test_what_is_not_finite_is_seen_on_all_ranks_and_not_remembered(ranks: RankPool, state: Int8State | None) -> None:
    results = ranks(2).run(_with_infinities, state)
    for rounds in results:
        ((before,), (then,), *after) = rounds
        assert bool(before.isfinite().all())
        assert not bool(then[:256].isfinite().any()) or not then[3].isfinite()
        assert not then[310].isfinite()
        assert all(bool(one.isfinite().all()) for (one,) in after)


def _resumed() -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank()
    whole, state = [], Int8State()
    model = Model([[(9, 8), ()], [(40,)]])
    saved: Any = None
    for step in range(6):
        if step == 3:
            saved = as_checkpoint(state.state_dict())
        whole += play(int8, state, model.buckets(rank, step))
    model, state = Model([[(9, 8), ()], [(40,)]]), Int8State()
    state.load_state_dict(saved)
    assert as_checkpoint(state.state_dict())["memory"].keys() == saved["memory"].keys()
    part = []
    for step in range(3, 6):
        part += play(int8, state, model.buckets(rank, step))
    return whole[6:], part


def test_resumes_bitwise(ranks: RankPool) -> None:
    for whole, part in ranks(2).run(_resumed):
        assert len(whole) == 6
        assert same_on_all([whole, part])


def test_errors_follow_their_parameters_into_other_buckets() -> None:
    state = Int8State()
    two = Model([[(9, 8)], [(40,)]])
    play(int8, state, two.buckets(0, 0))
    errors = [record["error"].clone() for bucket in two.buckets(0, 0) for record in state._memory.records(bucket)]
    assert all(bool(error.any()) for error in errors)
    one = Model([[(40,), (9, 8)]])
    one.parameters = [[two.parameters[1][0], two.parameters[0][0]]]
    (bucket,) = one.buckets(0, 0)
    flat = state._errors(bucket, 112)
    assert torch.equal(flat, torch.cat([errors[1], errors[0]]))
    assert state.memory_bytes == 4 * 112


def test_a_state_of_other_buckets_is_refused() -> None:
    state, other = Int8State(), Int8State()
    play(int8, state, Model([[(9, 8), (3,)]]).buckets(0, 0))
    other.load_state_dict(state.state_dict())
    (bucket,) = Model([[(9, 8)]]).buckets(0, 0)
    with pytest.raises(ValueError, match=r"2 parameters in bucket 0, which has 1 now.*replan"):
        int8(other, bucket).wait()
    other.load_state_dict(state.state_dict())
    (bucket,) = Model([[(3,), (9, 8)]]).buckets(0, 0)
    with pytest.raises(ValueError, match=r"72 numbers at place 0 of bucket 0, where there are 3 now"):
        int8(other, bucket).wait()


def test_a_state_of_another_hook_is_refused() -> None:
    with pytest.raises(ValueError, match="another communication hook"):
        Int8State().load_state_dict(PowerSGDState().state_dict())


@pytest.mark.parametrize("size", [1e-37, 1.0, 1e37])
def test_a_rounding_is_at_most_a_254th_of_the_largest_neighbour(size: float) -> None:
    """Numbers below 1e-36 once arrived as a few of their last bits."""
    row = torch.randn(1, 3 * CHUNK, generator=torch.Generator().manual_seed(0)) * size
    off = (Bytes().decode(Bytes().encode(row), row.numel()) - row).abs().view(3, CHUNK).amax(1)
    assert bool((off <= row.abs().view(3, CHUNK).amax(1) / 253).all())
