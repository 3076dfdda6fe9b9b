"""What a profile tells of some steps: kernels a step, the share of time that the device works, its gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.gpu.checks import Numbers
from benchmarks.gpu.ways import Tick, Work

GAP = 100.0
"""Microseconds without work that count as a gap."""
WARM, STEPS = 4, 3


def profiled(way: Callable[[Work, int, Tick], None], work: Work) -> Numbers:
    """The device's work in some steps, behind others that do not count."""
    work.model.to(work.device)
    activity = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(activities=[activity.CPU, activity.CUDA])
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if done == WARM:
            torch.cuda.synchronize()
            profile.start()
        elif done == WARM + STEPS:
            torch.cuda.synchronize()
            profile.stop()

    way(work, WARM + STEPS, tick)
    work.model.zero_grad()
    return summary(spans(profile.events()), STEPS)


def spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Beginning and end of each kernel and copy, in microseconds."""
    on_device = [
        event
        for event in events
        if "CUDA" in str(event.device_type) and not getattr(event, "is_user_annotation", False)  # ranges with a name
    ]
    return sorted((event.time_range.start, event.time_range.end) for event in on_device)


def summary(found: list[tuple[float, float]], steps: int) -> Numbers:
    """Kernels a step, the share of time in which the device works, and gaps a step.

    Example:
        >>> summary([(0, 10), (5, 20), (220, 240)], 1)
        {'kernels a step': 3.0, 'device at work': 0.167, 'gaps a step': 1.0}
    """
    if not found:
        return {}
    work, gaps, reached = 0.0, 0, found[0][0]
    for start, end in found:
        gaps += start - reached > GAP
        work += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - found[0][0]
    return {
        "kernels a step": round(len(found) / steps, 1),
        "device at work": round(work / whole, 3) if whole else None,
        "gaps a step": round(gaps / steps, 2),
    }
