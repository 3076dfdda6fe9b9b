"""What the parts of a step are told apart by: the host's clock, and events of a device that is behind the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.extensions.balancing.balance.step_times import (
    BACKWARD,
    DATA,
    FORWARD,
    PAUSE,
    WAITING,
    DeviceTimes,
    StepTimes,
)
from lockstep.supervise.collective_trace import WAITS, wrapped
from tests.extensions.balancing.balanced import Clock, QueuedWork
from tests.tools.pool import RankPool


class Worker:
    """Calls that take time on the host, or on a device."""

    def __init__(self, times: StepTimes, passes: Callable[[float], None]) -> None:
        self.passes = passes
        self.wait = times.timed(WAITING, passes)
        self.step = times.timed(FORWARD, self._step)
        self.backward = times.timed(BACKWARD, self._backward)
        self.validate = times.timed(PAUSE, passes)
        self.fetch = times.timed(DATA, passes)

    def _step(self) -> None:
        """Of 5 seconds 1 is waiting, and 2 are a backward inside."""
        self.passes(1)
        self.wait(1)
        self.passes(1)
        self.backward(1)

    def _backward(self, waits: float) -> None:
        self.passes(1)
        self.wait(waits)


def test_time_counts_for_the_innermost_part_once() -> None:
    clock = Clock()
    times = StepTimes(clock)
    work = Worker(times, lambda seconds: setattr(clock, "now", clock.now + seconds))
    clock.now += 100
    times.begin()
    work.fetch(0.5)
    work.step()
    work.backward(3)
    work.validate(50)
    clock.now += 0.25
    times.end_window(8, 1)
    times.end_window(4, 2)
    (first, second), busy = times.take(1)
    assert first == (8, 0.5, 2, 2, 5, 0.25)
    assert (first.busy, busy) == (4.75, [4.75])
    assert second == (4, 0, 0, 0, 0, 0)
    assert times.take(1) == ([], [])


def test_what_other_threads_do_is_no_part_of_a_step() -> None:
    clock = Clock()
    times = StepTimes(clock)
    call = times.timed(WAITING, lambda: setattr(clock, "now", clock.now + 1))
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    times.end_window(1, 0)
    assert times.take(0)[0][0] == (1, 0, 0, 0, 0, 1)


# -- a device


def test_a_devices_windows_are_taken_when_it_has_finished_them() -> None:
    device, clock = QueuedWork(), Clock()
    times = DeviceTimes(clock, device.event, lambda: "stream")
    work = Worker(times, device.passes)
    times.begin()
    for _ in range(2):
        clock.now += 10
        work.step()
        work.backward(3)
        work.validate(50)
        device.passes(0.25)
        times.end_window(8, 1)
    assert times.take(1) == ([], [])
    device.done = device.queued / 2
    assert times.take(1) == ([(8, 0, 2, 2, 5, 0.25)], [4.25])
    device.done = device.queued
    assert times.take(2) == ([(8, 0, 2, 2, 5, 0.25)], [])


def test_data_counts_on_a_device_as_far_as_it_has_nothing_to_do() -> None:
    device, clock = QueuedWork(), Clock()
    times = DeviceTimes(clock, device.event, lambda: "stream")
    fetch = times.timed(DATA, lambda: setattr(clock, "now", clock.now + 3))
    times.begin()
    for idle in (0.0, 1.0, 5.0):
        fetch()
        device.passes(idle)
        Worker(times, device.passes).backward(0)
        times.end_window(1, 0)
    device.done = device.queued
    found = [(window.data, window.backward, window.other) for window in times.take(0)[0]]
    assert found == [(0, 1, 0), (1, 1, 0), (3, 1, 2)]


# -- torch's collectives


def waited() -> tuple[float, bool]:
    """What collectives take a rank that others keep waiting, by a clock that counts calls."""
    clock = Clock()
    times = StepTimes(clock)
    before = dist.all_reduce, dist.barrier, dist.Work.wait

    def tick(fn: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            clock.now += 1
            return fn(*args, **kwargs)

        return times.timed(WAITING, call)

    with wrapped(lambda name, fn: tick(fn), WAITS):
        dist.all_reduce(torch.ones(1))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        dist.barrier()
        dist.all_gather_object([None, None], 1)  # which is two collectives inside
    times.end_window(1, 0)
    return times.take(0)[0][0].waiting, before == (dist.all_reduce, dist.barrier, dist.Work.wait)


def test_collectives_are_waiting_and_come_back_as_they_were(ranks: RankPool) -> None:
    for seconds, restored in ranks(2).run(waited):
        assert seconds >= 5
        assert restored
