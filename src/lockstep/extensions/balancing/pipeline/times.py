"""What the windows of a pipeline take one of its ranks: seconds of computing, apart from waiting for other stages."""

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

BEFORE, BLOCKS, BEHIND, BACKWARD = range(4)
"""Parts of a stage's work: the step before the chain, the blocks' forward, the step behind the chain, the backward."""
NAMES = ("before the chain", "blocks forward", "behind the chain", "backward")
NEWEST = 64
"""Windows that are kept until they are looked at."""


@dataclass(frozen=True)
class StageSpan:
    """A part of a stage's work on one micro-batch.

    Attributes:
        part: one of `BEFORE`, `BLOCKS`, `BEHIND` and `BACKWARD`.
        begin, end: seconds from the beginning of the window.
    """

    part: int
    begin: float
    end: float


class WindowOfStage(NamedTuple):
    """What a window took a stage.

    Attributes:
        begin, end: seconds by the clock of the host.
        seconds: by part, of all micro-batches.
        micro_batches: their number.
        spans: of the micro-batches, in their order, where somebody wants them.
    """

    begin: float
    end: float
    seconds: tuple[float, float, float, float]
    micro_batches: int
    spans: tuple[StageSpan, ...] = ()

    def look(self) -> tuple[float, float]:
        """Seconds of a micro-batch: of the blocks, and outside of them.

        A backward is shared out between the two as the forward is.
        """
        before, blocks, behind, backward = self.seconds
        forward = before + blocks + behind
        if not forward:
            return backward / self.micro_batches, 0.0
        scale = (1 + backward / forward) / self.micro_batches
        return blocks * scale, (before + behind) * scale


class StageTimes:
    """Measures the windows of a stage while it listens: by the host's clock, or by events on a GPU.

    Args:
        device: of the stage.
        make_event: an event that knows its time; default: torch's, where the device has such.

    Attributes:
        listens: whether the windows that begin now are measured.
        keeps_spans: whether the windows that begin now have spans.
        listener: told of each window as soon as it is measured; while there is one, all are.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], TimedEvent] | None = None) -> None:
        self.clock: Callable[[], float] = perf_counter
        self._device = device
        self.listens, self.keeps_spans = True, False
        self.listener: Callable[[WindowOfStage], None] | None = None
        if make_event is None and has_timed_events(device):
            make_event = partial(timed_event, device)
        self._make = make_event
        self._tape: list[tuple[int, Any, Any]] = []
        self._seconds = [0.0] * 4
        self._inside = False
        self._windows: deque[WindowOfStage] = deque(maxlen=NEWEST)
        self._pending: deque[_Pending] = deque(maxlen=NEWEST)

    def _event(self) -> TimedEvent:
        assert self._make is not None
        event = self._make()
        with current_device(self._device):
            event.record()
        return event

    @contextmanager
    def window(self, micro_batches: int) -> Iterator[None]:
        """Inside, a window runs."""
        if not micro_batches or not (self.listens or self.listener):
            yield
            return
        self._tape, self._inside = [], True
        self._seconds[:] = (0.0, 0.0, 0.0, 0.0)
        first, begin = None if self._make is None else self._event(), self.clock()
        try:
            yield
        finally:
            self._inside = False
        end = self.clock()
        if first is not None:
            self._pending.append(_Pending(begin, end, first, self._event(), self._tape, micro_batches))
            return
        before, blocks, behind, backward = self._seconds
        spans = tuple(StageSpan(part, begun - begin, ended - begin) for part, begun, ended in self._tape)
        self._note(WindowOfStage(begin, end, (before, blocks, behind, backward), micro_batches, spans))

    def wrapped(self, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, whose time counts for a part of a window that is measured."""

        @wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                return fn(*args, **kwargs)
            clock = self.clock
            begin = clock()
            result = fn(*args, **kwargs)
            end = clock()
            self._seconds[part] += end - begin
            if self.keeps_spans:
                self._tape.append((part, begin, end))
            return result

        @wraps(fn)
        def timed_on_gpu(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                return fn(*args, **kwargs)
            begin = self._event()
            result = fn(*args, **kwargs)
            self._tape.append((part, begin, self._event()))
            return result

        return timed if self._make is None else timed_on_gpu

    def _note(self, window: WindowOfStage) -> None:
        self._windows.append(window)
        if self.listener is not None:
            self.listener(window)

    def take(self) -> list[WindowOfStage]:
        """The windows since this was asked last that the device is through with; nobody waits for it."""
        while self._pending and self._pending[0].last.query():
            self._note(self._pending.popleft().read())
        found = list(self._windows)
        self._windows.clear()
        return found


class _Pending(NamedTuple):
    """A window that the host is through with, and the GPU may be not."""

    begin: float
    end: float
    first: Any
    last: Any
    tape: list[tuple[int, Any, Any]]
    micro_batches: int

    def read(self) -> WindowOfStage:
        """The same by the GPU's time."""
        spans = [StageSpan(part, *(self.first.elapsed_time(e) / 1e3 for e in ends)) for part, *ends in self.tape]
        seconds = [sum(span.end - span.begin for span in spans if span.part == part) for part in range(4)]
        before, blocks, behind, backward = seconds
        return WindowOfStage(self.begin, self.end, (before, blocks, behind, backward), self.micro_batches, tuple(spans))


def typical(windows: list[WindowOfStage]) -> tuple[float, float, float]:
    """Seconds of the blocks and outside of them, for a micro-batch, and micro-batches of a window: medians.

    NaN where there is no window.
    """
    if not windows:
        return math.nan, math.nan, math.nan
    looks = [window.look() for window in windows]
    return (
        median(blocks for blocks, _ in looks),
        median(outside for _, outside in looks),
        median(float(window.micro_batches) for window in windows),
    )
