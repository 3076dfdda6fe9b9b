"""Predictions of a plan against runs: memory at the peak, and seconds of a step, of ten models under each way to train.

    python benchmarks/plan.py                       # docs/planning.md says what a run of it found
    python benchmarks/plan.py --models gpt lstm --rounds 1

Seconds are predicted from steps that one process measured, and measured in two ranks. On a machine that others use, the
two are taken in turns, and each prediction is compared with the run beside it; what is printed is the median.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch

from lockstep.extensions.balancing.planner.cost import Prediction, predict
from lockstep.extensions.balancing.planner.hardware import hardware_of
from lockstep.extensions.balancing.planner.partition import Device, partition
from lockstep.extensions.balancing.planner.profile import ModelProfile
from lockstep.extensions.balancing.plans.planning import profile_module
from lockstep.precision.formats import make_precision
from lockstep.strategies import DDPStrategy
from tests.extensions.balancing.planner.models import MODELS, counted, made, timed
from tests.extensions.balancing.planner.test_memory import WAYS
from tests.extensions.balancing.planner.test_partition import large
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

CPU = torch.device("cpu")


def memory_of(name: str, way: str, world: int) -> float:
    """Bytes at the peak of this rank."""
    return counted(name, WAYS[way][1](), world)["peak"]


def seconds_of(name: str, way: str, world: int) -> float:
    """Seconds of a step of this rank."""
    in_memory = {"ddp": DDPStrategy(), "sharded": DDPStrategy(shard_optimizer=True)}  # as users have it
    strategy = in_memory[way] if way in in_memory else WAYS[way][1]()
    return timed(name, strategy, world, steps=16)


def profiled(name: str) -> ModelProfile:
    """With measured seconds."""
    module, _, batch = made(name)
    module.to(CPU)
    return profile_module(module, batch, make_precision("32-true"), trainer=quiet(), device=CPU)


def compare(pool: RankPool, name: str, ways: list[str], rounds: int, memory: bool) -> dict[str, tuple[float, float]]:
    """Print a line for each way; gives predicted and measured seconds."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    peaks: dict[str, float] = {}
    predictions: dict[str, Prediction] = {}
    for number in range(rounds):
        for way in ways:
            candidate = WAYS[way][0]
            world = 1 if candidate.kind == "single" else 2
            profile = profiled(name)
            if candidate.recomputed and "recomputed" not in profile.steps:
                continue
            machine = hardware_of(CPU, world)
            predictions[way] = predict(profile, candidate, machine)
            here = [seconds_of(name, way, 1)] if world == 1 else pool.run(seconds_of, name, way, 2, timeout=600)
            found[way].append((predictions[way].seconds, max(here)))
            if memory and number == 0:
                most = [memory_of(name, way, 1)] if world == 1 else pool.run(memory_of, name, way, 2, timeout=600)
                peaks[way] = max(most)
    result = {}
    for way, pairs in found.items():
        if not pairs:
            continue
        ratio = statistics.median(a / b for a, b in pairs)
        predicted, measured = (statistics.median(values) for values in zip(*pairs, strict=True))
        result[way] = ratio * measured, measured
        took = f"{1000 * predicted:8.1f} ms predicted {1000 * measured:8.1f} ms measured {ratio - 1:+6.0%}"
        peak = f"  memory {predictions[way].memory / peaks[way] - 1:+6.1%}" if way in peaks else ""
        print(f"{name:12} {way:20} {took}{peak}", flush=True)
    return result


def order(results: list[dict[str, tuple[float, float]]]) -> tuple[int, int]:
    """The pairs of ways whose measured seconds differ by more than 20 %: those predicted in order, and all."""
    right = count = 0
    for result in results:
        for (a, b), (c, d) in itertools.combinations(result.values(), 2):
            if max(b, d) > 1.2 * min(b, d):
                count += 1
                right += (a < c) is (b < d)
    return right, count


def time_partition() -> None:
    """Seconds of the processor for 1,000 blocks on 64 devices."""
    for kinds in (1, 3, 1000):
        for room in (float("inf"), 70.0):
            devices = [Device(speed=1 + 0.1 * (at % 3), memory=room, bandwidth=10.0) for at in range(64)]
            blocks, begun = large(kinds, 1000), time.process_time()
            partition(blocks, devices)
            took = time.process_time() - begun
            print(f"partition of 1000 blocks of {kinds} kinds on 64 devices, memory {room:g}: {took:.2f} s")


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="count memory, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    time_partition()
    results = []
    with RankPool(2) as pool:
        for name in args.models:
            results.append(compare(pool, name, args.ways, args.rounds, args.memory))
    errors = [a / b - 1 for result in results for a, b in result.values()]
    within = sum(abs(error) <= 0.2 for error in errors)
    right, count = order(results)
    print(f"seconds within 20 %: {within} of {len(errors)}")
    print(f"pairs that differ by more than 20 %, in order: {right} of {count}")
    print(f"cache of the hardware: {Path.home() / '.cache' / 'lockstep'}")


if __name__ == "__main__":
    main()
