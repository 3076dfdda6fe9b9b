"""Timers for the parts of a training step on this rank: loading, forward, backward, waiting, and the rest."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from lockstep.data.source import LoaderSource
from lockstep.engines.strategy import Strategy
from lockstep.ground.device import TimedEvent, current_stream, has_streams, timed_event
from lockstep.ground.methods import replace_until
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.step import Step
from lockstep.supervise.collective_trace import WAITS, wrapped

PARTS = ("data", "forward", "backward", "waiting", "other")
"""Parts of a window's time, in the order of `WindowTimes`."""


class WindowTimes(NamedTuple):
    """Seconds that one rank spends on each part of an accumulation window, or medians over several windows.

    Attributes:
        samples: number of this rank's samples in the window.
        data: waiting for batches.
        forward: ``training_step``, without its waits for other ranks.
        backward: until the last gradients are being sent.
        waiting: in collectives, and for gradients from other ranks.
        other: the update, hooks, and the loop itself.
    """

    samples: float
    data: float
    forward: float
    backward: float
    waiting: float
    other: float

    @property
    def busy(self) -> float:
        """Seconds of all parts except waiting."""
        return self.data + self.forward + self.backward + self.other


def typical(windows: Sequence[WindowTimes]) -> WindowTimes:
    """Return the upper median of each part over one or more windows."""
    # statistics.median would take three times as long
    half = len(windows) // 2
    return WindowTimes(*[sorted(column)[half] for column in zip(*windows, strict=True)])


DATA, FORWARD, BACKWARD, WAITING, PAUSE = range(5)
"""Parts of a window's time; a pause (a validation) does not count."""
NEWEST = 64
"""Windows that are kept until they are taken."""

_END = object()
_Tape = list[tuple[int, int, TimedEvent, TimedEvent]]
"""Part, depth, start, end; inner calls precede the outer one."""


class StepTimes:
    """Timer for the parts of a fit's accumulation windows, based on the host's clock.

    Time counts for the innermost part: a wait within a backward counts as waiting only.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._windows: deque[tuple[WindowTimes, int]] = deque(maxlen=NEWEST)
        self._seconds = [0.0] * 5
        self._inner = [0.0]  # seconds of the timed calls within the current one
        self._since = clock()
        self._end = ExitStack()
        self._source: object = None

    # -- measurement

    @contextmanager
    def attached(self, strategy: Strategy, step: Step, validation: EvaluationLoop) -> Iterator[None]:
        """Measure the fit's accumulation windows while the context is active.

        Args:
            strategy: the fit's strategy, after its setup.
            step: the fit's `Step`, which runs accumulation windows.
            validation: the fit's validation loop, whose time does not count for a window.
        """
        # methods are replaced, as a profiler does, so that a run that measures nothing pays nothing
        self._replace(step, "training_step", FORWARD)
        self._replace(strategy, "backward", BACKWARD)
        self._replace(validation, "evaluate", PAUSE)
        for owner, name in strategy.waits_in:
            self._replace(owner, name, WAITING)
        with self._end, wrapped(lambda name, fn: self.timed(WAITING, fn), WAITS):
            yield

    def attach_source(self, source: LoaderSource) -> None:
        """Measure how long this rank waits for batches from a loader source, unless the source is attached already."""
        if source is self._source:
            return
        self._source = source
        for name in ("open", "weighed"):
            setattr(source, name, self._timed_opening(getattr(source, name)))

    def timed(self, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``fn`` so that its running time is added to one part of the current window."""
        seconds, inner, clock, mine = self._seconds, self._inner, self.clock, get_ident()
        anywhere = part == WAITING  # torch's collectives; only the loop calls the others

        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            # other threads wait while this one computes, and a clock would break the graph of torch.compile
            if anywhere and (get_ident() != mine or is_compiling()):
                return fn(*args, **kwargs)
            around, inner[0] = inner[0], 0.0
            begin = clock()
            try:
                return fn(*args, **kwargs)
            finally:
                elapsed = clock() - begin
                seconds[part] += elapsed - inner[0]
                inner[0] = around + elapsed

        return timed

    def _replace(self, owner: object, name: str, part: int) -> None:
        replace_until(self._end, owner, name, self.timed(part, getattr(owner, name)))

    def _timed_opening(self, opening: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def opened(*args: Any, **kwargs: Any) -> Iterator[Any]:
            return iter(self.timed(DATA, iter(opening(*args, **kwargs)).__next__), _END)

        return opened

    # -- windows

    def begin(self) -> None:
        """Start the first window of an epoch."""
        self._since = self.clock()
        # in place: timed calls refer to this list
        self._seconds[:] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def end_window(self, samples: float, kind: int) -> None:
        """Record the window that ends now, and start the next one.

        Args:
            samples: this rank's number in it.
            kind: by which :meth:`take` selects windows.
        """
        now, seconds = self.clock(), self._seconds
        data, forward, backward, waiting, pause = seconds
        other = now - self._since - data - forward - backward - waiting - pause
        self._windows.append((WindowTimes(samples, data, forward, backward, waiting, other), kind))
        self._since = now
        seconds[:] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def take(self, kind: int) -> tuple[list[WindowTimes], list[float]]:
        """Return (windows, busy): the windows since the last call, and the busy seconds of those with this ``kind``."""
        found = list(self._windows)
        self._windows.clear()
        return [window for window, _ in found], [window.busy for window, of in found if of == kind]


# -- on a GPU --------------------------------------------------------------------------------------------------


class DeviceTimes(StepTimes):
    """Timer for the parts of a fit's accumulation windows, based on device events and without synchronization.

    Forward, backward and waiting are times of the device. Fetching data counts as far as the device is idle meanwhile.

    Args:
        clock: the host's clock.
        make_event: creates an event that records its time.
        stream: returns the current stream; work on other streams does not count for the step.
    """

    def __init__(
        self, clock: Callable[[], float], make_event: Callable[[], TimedEvent], stream: Callable[[], object]
    ) -> None:
        super().__init__(clock)
        self._make, self._stream, self._own_stream = make_event, stream, stream()
        self._tape: _Tape = []
        self._depth = 0
        self._last = self._now()
        self._pending: deque[tuple[float, int, float, _Tape, TimedEvent, TimedEvent]] = deque()

    @classmethod
    def of(cls, device: torch.device, clock: Callable[[], float]) -> DeviceTimes:
        """Create a timer for the current device of ``device``'s type, which must support timed events."""
        # without streams, all work is on one: str() equals itself
        stream = functools.partial(current_stream, device) if has_streams(device) else str
        return cls(clock, functools.partial(timed_event, device), stream)

    def _now(self) -> TimedEvent:
        event = self._make()
        event.record()
        return event

    def timed(self, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``fn`` so that its running time is added to one part of the current window."""
        # loading is the host's work
        if part == DATA:
            return super().timed(part, fn)
        mine = get_ident()

        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != mine or is_compiling() or self._stream() != self._own_stream:
                return fn(*args, **kwargs)
            begin, depth = self._now(), self._depth
            self._depth = depth + 1
            try:
                return fn(*args, **kwargs)
            finally:
                self._depth = depth
                self._tape.append((part, depth, begin, self._now()))

        return timed

    def begin(self) -> None:
        """Start the first window of an epoch."""
        super().begin()
        self._tape, self._last = [], self._now()

    def end_window(self, samples: float, kind: int) -> None:
        """Record a window that the host has finished launching, even if the device is still computing it."""
        end = self._now()
        self._pending.append((samples, kind, self._seconds[DATA], self._tape, self._last, end))
        self._seconds[DATA] = 0.0
        self._tape, self._last = [], end
        if len(self._pending) > NEWEST:
            self._pending.popleft()

    def take(self, kind: int) -> tuple[list[WindowTimes], list[float]]:
        """Do the work of `StepTimes.take` for the windows that the device has finished."""
        while self._pending and self._pending[0][-1].query():
            samples, of, data, tape, begin, end = self._pending.popleft()
            seconds, inside = [0.0] * 5, [0.0]
            # inner calls come first, so that their seconds are known when the outer call's are taken
            for part, depth, called, returned in tape:
                inside += [0.0] * (depth + 2 - len(inside))
                elapsed = called.elapsed_time(returned) / 1e3
                seconds[part] += elapsed - inside[depth + 1]
                inside[depth + 1] = 0.0
                inside[depth] += elapsed
            idle = begin.elapsed_time(end) / 1e3 - sum(seconds)
            # the host loads ahead of the device: only what the device waited for counts
            data = max(0.0, min(data, idle))
            _, forward, backward, waiting, _ = seconds
            self._windows.append((WindowTimes(samples, data, forward, backward, waiting, max(0.0, idle - data)), of))
        return super().take(kind)
