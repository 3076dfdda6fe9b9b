"""Timers for a pipeline's stages: seconds of computing in a window, without waiting for other stages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from lockstep.ground.device import TimedEvent, current_device, has_timed_events, timed_event

BEFORE, BLOCKS, AFTER, BACKWARD = range(4)
"""Parts of a stage's work: the step before the chain, the blocks' forward, the step after the chain, the backward."""
NAMES = ("before the chain", "blocks forward", "after the chain", "backward")
NEWEST = 64
"""Windows that are kept until they are taken."""


@dataclass(frozen=True)
class StageSpan:
    """Start and end of one part of a stage's work on a micro-batch.

    Attributes:
        part: one of `BEFORE`, `BLOCKS`, `AFTER` and `BACKWARD`.
        begin: seconds since the start of the window.
        end: seconds since the start of the window.
    """

    part: int
    begin: float
    end: float


class WindowOfStage(NamedTuple):
    """Measured times of an accumulation window on a stage.

    Attributes:
        begin: seconds by the clock of the host.
        end: seconds by the clock of the host.
        seconds: by part, the sum over all micro-batches.
        micro_batches: number of micro-batches.
        spans: parts of the micro-batches, in the order in which they ran.
    """

    begin: float
    end: float
    seconds: tuple[float, float, float, float]
    micro_batches: int
    spans: tuple[StageSpan, ...]

    def per_micro_batch(self) -> tuple[float, float]:
        """Return (seconds inside the blocks, seconds outside the blocks), both as means per micro-batch."""
        before, blocks, after, backward = self.seconds
        forward = before + blocks + after
        if not forward:
            return backward / self.micro_batches, 0.0
        # the backward is one call: it is divided between the two as the forward is
        scale = (1 + backward / forward) / self.micro_batches
        return blocks * scale, (before + after) * scale


class StageTimes:
    """Timer for the windows of a stage, based on the host's clock or on GPU events.

    Args:
        device: the stage's device.
        make_event: creates an event that records its time; default: torch's, if the device has timed events.

    Attributes:
        listens: True if windows that start now are measured.
        listener: receives each window as soon as it is measured. With a listener all windows are measured.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], TimedEvent] | None = None) -> None:
        self.clock: Callable[[], float] = perf_counter
        self._device = device
        self.listens = True
        self.listener: Callable[[WindowOfStage], None] | None = None
        if make_event is None and has_timed_events(device):
            make_event = partial(timed_event, device)
        self._make = make_event
        self._tape: list[tuple[int, Any, Any]] = []
        self._inside = False
        self._windows: deque[WindowOfStage] = deque(maxlen=NEWEST)
        self._pending: deque[_Pending] = deque(maxlen=NEWEST)

    def _now(self) -> Any:
        """Return the current time of the host's clock, or a new event recorded on the GPU."""
        if self._make is None:
            return self.clock()
        event = self._make()
        with current_device(self._device):
            event.record()
        return event

    @contextmanager
    def window(self, micro_batches: int) -> Iterator[None]:
        """Measure the accumulation window that runs in the context, if `listens` is True or a listener is set."""
        if not micro_batches or not (self.listens or self.listener):
            yield
            return
        self._tape, self._inside = [], True
        first, begin = self._now(), self.clock()
        try:
            yield
        finally:
            self._inside = False
        window = _Pending(begin, self.clock(), first, self._now(), self._tape, micro_batches)
        if self._make is None:
            self._add(window.read())
        else:
            self._pending.append(window)

    def wrapped(self, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``fn`` so that its running time is recorded as one part of a measured window."""

        @wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                return fn(*args, **kwargs)
            begin = self._now()
            result = fn(*args, **kwargs)
            self._tape.append((part, begin, self._now()))
            return result

        return timed

    def _add(self, window: WindowOfStage) -> None:
        self._windows.append(window)
        if self.listener is not None:
            self.listener(window)

    def take(self) -> list[WindowOfStage]:
        """Return the measured windows that the device has finished since the last call. Do not wait for the device."""
        while self._pending and self._pending[0].last.query():
            self._add(self._pending.popleft().read())
        found = list(self._windows)
        self._windows.clear()
        return found


class _Pending(NamedTuple):
    """A window that the host has finished but the GPU may still be computing, with clock times or GPU events."""

    begin: float
    end: float
    first: Any
    last: Any
    tape: list[tuple[int, Any, Any]]
    micro_batches: int

    def read(self) -> WindowOfStage:
        """Compute the seconds of each part, and return them as a `WindowOfStage`."""

        def elapsed(end: Any) -> float:
            return end - self.first if isinstance(end, float) else self.first.elapsed_time(end) / 1e3

        spans = [StageSpan(part, *map(elapsed, ends)) for part, *ends in self.tape]
        seconds = [sum(span.end - span.begin for span in spans if span.part == part) for part in range(4)]
        before, blocks, after, backward = seconds
        return WindowOfStage(self.begin, self.end, (before, blocks, after, backward), self.micro_batches, tuple(spans))


def typical(windows: list[WindowOfStage]) -> tuple[float, float, float]:
    """Return medians over windows: (a micro-batch's seconds inside the blocks, outside, number of micro-batches).

    All three are NaN if there is no window.
    """
    if not windows:
        return math.nan, math.nan, math.nan
    seconds = [window.per_micro_batch() for window in windows]
    return (
        median(blocks for blocks, _ in seconds),
        median(outside for _, outside in seconds),
        median(float(window.micro_batches) for window in windows),
    )
