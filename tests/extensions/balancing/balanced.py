"""Helpers of tests of balanced runs: clocks and devices whose time is made up, and random splits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from lockstep import Callback
from lockstep.testing import EquivalenceReport

Seconds = Callable[[int, int, int], float]
"""What a micro-batch takes, given the rank, the optimizer step and the number of samples."""


class Clock:
    """A clock that stands still unless somebody moves it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class QueuedWork:
    """Work of a made-up device. Its events have their time when it is done."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0

    def passes(self, seconds: float) -> None:
        self.queued += seconds

    def event(self) -> Any:
        return QueuedEvent(self)


class QueuedEvent:
    def __init__(self, work: QueuedWork) -> None:
        self.work, self.at = work, -1.0

    def record(self) -> None:
        self.at = self.work.queued

    def query(self) -> bool:
        return self.work.done >= self.at

    def elapsed_time(self, end: Any) -> float:
        assert self.query()
        assert end.query()
        return float(end.at - self.at) * 1e3


def check_reports(reports: Iterable[EquivalenceReport]) -> None:
    for report in reports:
        assert report, report


def draw_split(draw: random.Random, blocks: int, stages: int) -> list[int]:
    cuts = [0, *sorted(draw.sample(range(1, blocks), stages - 1)), blocks]
    return [stop - start for start, stop in pairwise(cuts)]


@contextmanager
def made_up_clock() -> Iterator[Clock]:
    """Inside, fits that begin measure their steps, and the stages of a pipeline, by this clock."""
    clock = Clock()
    with (
        patch("lockstep.extensions.balancing.balance.balance.perf_counter", clock),
        patch("lockstep.extensions.balancing.pipeline.times.perf_counter", clock),
    ):
        yield clock


class Takes(Callback):
    """Lets each micro-batch take as long as a function says, and notes how many samples each step had here.

    Attributes:
        parts: this rank's samples of each step.
    """

    def __init__(self, clock: Clock, seconds: Seconds) -> None:
        self.clock, self.seconds = clock, seconds
        self.parts: dict[int, int] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        samples, step = int(trainer.results.weight), trainer.global_step
        self.clock.now += self.seconds(trainer.global_rank, step, samples)
        if trainer.world_size > 1:  # else it is the one process of a comparison
            self.parts[step] = self.parts.get(step, 0) + samples


def slow_rank(rank: int, factor: float = 3.0, fixed: float = 1.0, until: int = 10**9) -> Seconds:
    """One rank is slower by a factor; from a step on, the next one."""

    def seconds(mine: int, step: int, samples: int) -> float:
        slow = rank if step < until else rank + 1
        return (factor if mine == slow else 1.0) * (fixed + samples) / 1000

    return seconds
