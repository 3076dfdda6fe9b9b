"""What the windows of a pipeline take one of its ranks: seconds of computing, apart from waiting for other stages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from lockstep.parallel.pipeline.control import StageLook

BEFORE, BLOCKS, BEHIND, BACKWARD = range(4)
"""Parts of a stage's work: the step before the chain, the blocks' forward, the step behind the chain, the backward."""
NAMES = ("before the chain", "blocks forward", "behind the chain", "backward")
NEWEST = 64
"""Windows that are kept until they are looked at."""


class Event(Protocol):
    """A point in the work of a device: see `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to a later one."""
        ...


@dataclass(frozen=True)
class Span:
    """A part of a stage's work on one micro-batch.

    Attributes:
        part: one of `BEFORE`, `BLOCKS`, `BEHIND` and `BACKWARD`.
        begin, end: seconds; from the beginning of the window on a GPU, else by the clock of the host.
    """

    part: int
    begin: float
    end: float


@dataclass(frozen=True)
class WindowOfStage:
    """What a window took a stage.

    Attributes:
        begin, end: seconds by the clock of the host.
        spans: of its micro-batches, in their order.
        micro_batches: their number.
    """

    begin: float
    end: float
    spans: tuple[Span, ...]
    micro_batches: int

    def seconds(self, *parts: int) -> float:
        """Of some parts."""
        return sum(span.end - span.begin for span in self.spans if span.part in parts)

    def look(self) -> StageLook:
        """Of a micro-batch. A backward is shared out between the blocks and the rest as the forward is."""
        blocks, outside = self.seconds(BLOCKS), self.seconds(BEFORE, BEHIND)
        total = (blocks + outside + self.seconds(BACKWARD)) / self.micro_batches
        share = blocks / (blocks + outside) if blocks + outside else 1.0
        return StageLook(share * total, (1 - share) * total)


def _event_of_gpu() -> Event:
    return torch.cuda.Event(enable_timing=True)


class StageTimes:
    """Measures the windows of a stage while it listens: by the host's clock, or by events on a GPU.

    Args:
        device: of the rank.
        make_event: an event that knows its time; default: torch's, where the device is a GPU.

    Attributes:
        listens: whether the windows that begin now are measured.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Event] | None = None) -> None:
        self.clock = perf_counter
        self.listens = True
        self._make = _event_of_gpu if make_event is None and device.type == "cuda" else make_event
        self._tape: list[tuple[int, Any, Any]] = []
        self._begin = 0.0
        self._inside = False
        self._first: Any = None
        self._windows: deque[WindowOfStage] = deque(maxlen=NEWEST)
        self._pending: deque[tuple[float, float, Any, Any, list[tuple[int, Any, Any]], int]] = deque(maxlen=NEWEST)

    def moment(self) -> Any:
        """Now, for :meth:`add`."""
        if self._make is None:
            return self.clock()
        event = self._make()
        event.record()
        return event

    def add(self, part: int, begin: Any) -> None:
        """A part of the work is over that began at a :meth:`moment`."""
        self._tape.append((part, begin, self.moment()))

    @property
    def measures(self) -> bool:
        """Whether a window that is measured runs."""
        return self._inside

    @contextmanager
    def window(self, micro_batches: int) -> Iterator[None]:
        """Inside, a window runs."""
        if not self.listens or not micro_batches:
            yield
            return
        self._tape, self._inside = [], True
        self._begin = self.clock()
        first = None if self._make is None else self.moment()
        try:
            yield
        finally:
            self._inside = False
        if self._make is None:
            spans = tuple(Span(*each) for each in self._tape)
            self._windows.append(WindowOfStage(self._begin, self.clock(), spans, micro_batches))
        else:
            self._pending.append((self._begin, self.clock(), first, self.moment(), self._tape, micro_batches))

    def wrapped(self, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, whose time counts for a part of a window that is measured."""

        @wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                return fn(*args, **kwargs)
            begin = self.moment()
            result = fn(*args, **kwargs)
            self.add(part, begin)
            return result

        return timed

    def take(self) -> list[WindowOfStage]:
        """The windows since this was asked last that the device is through with; nobody waits for it."""
        while self._pending and self._pending[0][3].query():
            begin, end, first, _, tape, count = self._pending.popleft()
            spans = (Span(part, *(first.elapsed_time(e) / 1e3 for e in ends)) for part, *ends in tape)
            self._windows.append(WindowOfStage(begin, end, tuple(spans), count))
        found = list(self._windows)
        self._windows.clear()
        return found


def typical(windows: list[WindowOfStage]) -> tuple[float, float, float]:
    """Seconds of the blocks and outside of them, for a micro-batch, and micro-batches of a window: medians.

    NaN where there is no window.
    """
    if not windows:
        return math.nan, math.nan, math.nan
    looks = [window.look() for window in windows]
    return (
        median(look.blocks for look in looks),
        median(look.outside for look in looks),
        median(float(window.micro_batches) for window in windows),
    )
