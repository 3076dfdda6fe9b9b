"""The split of a chain: the best there is, by trying all others; what cannot be split; and how long it takes."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.extensions.balancing.planner.partition import Block, Device, DoesNotFit, memory_of, partition


def drawn(draw: random.Random) -> tuple[list[Block], list[Device]]:
    """A chain of at most 12 blocks and at most 4 devices; memory is often short."""
    count = draw.randint(1, 12)
    alike = draw.random() < 0.3
    blocks = [
        Block(
            seconds=(seconds := draw.uniform(0.1, 3.0)),
            again=math.inf if draw.random() < 0.4 else seconds / 3,
            states=draw.uniform(0, 4),
            kept=(kept := draw.uniform(0, 6)),
            inputs=draw.uniform(0, 1) * kept,
            working=draw.choice([0.0, draw.uniform(0, 3)]),
            sends=draw.uniform(0, 1),
        )
        for _ in range(count)
    ]
    if alike:
        blocks = [blocks[0]] * count
    total = sum(block.states + block.kept for block in blocks)
    devices = [
        Device(
            speed=draw.choice([1.0, 2.0, draw.uniform(0.5, 4)]),
            memory=draw.choice([math.inf, total * draw.uniform(0.1, 1.5), total * draw.uniform(0.3, 1.0)]),
            bandwidth=draw.choice([math.inf, draw.uniform(0.5, 10)]),
            latency=draw.choice([0.0, 0.1]),
            in_flight=draw.choice([1, 1, 2, 3]),
        )
        for _ in range(draw.randint(1, 4))
    ]
    return blocks, devices


BITS = {n: (torch.arange(2**n)[:, None] >> torch.arange(n)) % 2 == 1 for n in range(1, 13)}


def best_stage(blocks: list[Block], device: Device, start: int, stop: int) -> float:
    """Seconds of a stage, by trying every choice of what is computed again."""
    mine = blocks[start:stop]
    able = [at for at, block in enumerate(mine) if block.saves]
    chosen = torch.zeros(2 ** len(able), len(mine), dtype=torch.bool)
    if able:
        chosen[:, able] = BITS[len(able)]

    def row(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    saved = torch.where(chosen, row([block.saves for block in mine]), 0.0)
    again = row([block.again if block.saves else 0.0 for block in mine])
    kept = row([block.kept for block in mine]) - saved
    peak = (row([block.working for block in mine]) + saved).amax(1)
    memory = sum(block.states for block in mine) + device.in_flight * kept.sum(1) + peak
    seconds = sum(block.seconds for block in mine) + torch.where(chosen, again, 0.0).sum(1)
    fits = memory <= device.memory * (1 + 1e-12)
    if not bool(fits.any()):
        return math.inf
    messages = 0.0
    for end in (start, stop):
        if 0 < end < len(blocks):
            messages += 2 * (device.latency + blocks[end - 1].sends / device.bandwidth)
    return float(seconds[fits].min()) / device.speed + messages


def greedy_stage(blocks: list[Block], device: Device, start: int, stop: int) -> float:
    """Seconds of a stage whose cheapest bytes are computed again, kind by kind, until it fits."""
    mine = blocks[start:stop]
    kinds = [(b.again / b.saves, -b.saves, b.working) if b.saves else None for b in mine]
    again: frozenset[int] = frozenset()
    for kind in sorted({kind for kind in kinds if kind}):
        alike = [at for at, other in enumerate(kinds) if other == kind]
        before = again
        for number in range(len(alike) + 1):
            if memory_of(mine, device, again) <= device.memory * (1 + 1e-12):
                break
            again = before | frozenset(alike[:number])
    if memory_of(mine, device, again) > device.memory * (1 + 1e-12):
        return math.inf
    seconds = sum(b.seconds for b in mine) + sum(mine[at].again for at in again)
    ends = [end for end in (start, stop) if 0 < end < len(blocks)]
    return seconds / device.speed + sum(2 * (device.latency + blocks[end - 1].sends / device.bandwidth) for end in ends)


Seconds = Callable[[list[Block], Device, int, int], float]


def by_brute_force(blocks: list[Block], devices: list[Device], spare: bool, seconds: Seconds) -> float:
    count = len(blocks)
    known: dict[tuple[int, int, int], float] = {}
    best = math.inf
    for cuts in itertools.combinations_with_replacement(range(count + 1), len(devices) - 1):
        ends = (0, *cuts, count)
        if not spare and any(start == stop for start, stop in itertools.pairwise(ends)):
            continue
        worst = 0.0
        for at, (start, stop) in enumerate(itertools.pairwise(ends)):
            if start < stop and worst < best:
                key = at, start, stop
                if key not in known:
                    known[key] = seconds(blocks, devices[at], start, stop)
                worst = max(worst, known[key])
        best = min(best, worst)
    return best


def check(seed: int) -> float:
    """Compares a random case with all other splits; gives how much of the best way's seconds it takes; 0: none fits."""
    blocks, devices = drawn(random.Random(seed))
    spare = seed % 3 > 0 or len(blocks) < len(devices)
    expected = by_brute_force(blocks, devices, spare, greedy_stage)
    best = by_brute_force(blocks, devices, spare, best_stage)
    if expected == math.inf:
        with pytest.raises(DoesNotFit) as raised:
            partition(blocks, devices, spare)
        larger = [replace(device, memory=device.memory + raised.value.missing * (1 + 1e-9)) for device in devices]
        partition(blocks, larger, spare)
        return 0.0 if best == math.inf else math.inf
    found = partition(blocks, devices, spare)
    assert spare or len(found.stages) == len(devices)
    assert found.bottleneck == pytest.approx(expected, rel=1e-8), seed
    assert found.bottleneck > best * (1 - 1e-8)
    at = 0
    for stage in found.stages:
        assert stage.start == at
        at = stage.stop
        assert stage.memory <= devices[stage.device].memory * (1 + 1e-9)
        inner = frozenset(index - stage.start for index in stage.recomputed)
        mine = blocks[stage.start : stage.stop]
        assert stage.memory == memory_of(mine, devices[stage.device], inner)
        assert stage.seconds == pytest.approx(greedy_stage(blocks, devices[stage.device], stage.start, stage.stop))
    assert at == len(blocks)
    return found.bottleneck / best


def test_no_split_is_better() -> None:
    ratios = [check(seed) for seed in range(80)]
    fitted = [ratio for ratio in ratios if ratio]
    assert 24 < len(fitted) < 78  # both kinds are tried
    assert sum(ratio < 1 + 1e-8 for ratio in fitted) > 0.95 * len(fitted)  # as good as if every choice were tried
    assert max(fitted) < 1.1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_split_is_better_in_5000_cases() -> None:
    ratios = [ratio for seed in range(80, 5080) if (ratio := check(seed))]
    assert len(ratios) > 1500
    assert sum(ratio < 1 + 1e-8 for ratio in ratios) > 0.98 * len(ratios)


def large(kinds: int, count: int, seed: int = 0) -> list[Block]:
    draw = random.Random(seed)
    made = []
    for _ in range(kinds):
        seconds, kept = draw.uniform(0.5, 1.5), draw.uniform(4, 6)
        made.append(Block(seconds, seconds / 3, 1.0, kept, 0.1 * kept, 0.5, 0.01))
    return [made[at % kinds] for at in range(count)]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("kinds", "memory"), [(1, math.inf), (3, 70.0), (1000, math.inf), (100, 70.0)])
def test_a_thousand_blocks_on_64_devices_take_no_time(kinds: int, memory: float) -> None:
    blocks = large(kinds, 1000)
    devices = [Device(speed=1 + 0.1 * (at % 3), memory=memory, bandwidth=10.0) for at in range(64)]
    begun = time.process_time()
    found = partition(blocks, devices)
    assert time.process_time() - begun < 3  # 0.2 to 0.8 s on a busy core
    assert found.stages[-1].stop == 1000
    least = sum(block.seconds for block in blocks) / sum(device.speed for device in devices)
    assert least <= found.bottleneck
    assert any(stage.recomputed for stage in found.stages) is (memory < math.inf)


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    chain = [Block(1.0, states=10.0)] * 4
    with pytest.raises(DoesNotFit, match="would need 4 bytes more") as raised:
        partition(chain, [Device(memory=16.0)] * 2)
    assert raised.value.missing == pytest.approx(4.0)
    partition(chain, [Device(memory=20.0)] * 2)
    with pytest.raises(DoesNotFit, match="block 1 alone needs 5 bytes more than any device has"):
        partition([chain[0], Block(1.0, states=15.0)], [Device(memory=10.0)] * 3)
    with pytest.raises(ValueError, match="0 blocks over 1 devices"):
        partition([], [Device()])
