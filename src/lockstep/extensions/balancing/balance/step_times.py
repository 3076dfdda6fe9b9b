"""Where the time of a step goes on this rank: fetching data, forward, backward, waiting for other ranks, the rest."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.compiler import is_compiling

from lockstep.data.source import LoaderSource
from lockstep.engines.strategy import Strategy
from lockstep.extensions.balancing.window_times import WindowTimes
from lockstep.ground.device import TimedEvent, current_stream, has_streams, timed_event
from lockstep.ground.methods import replace_until
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.step import Step
from lockstep.supervise.collective_trace import WAITS, wrapped

DATA, FORWARD, BACKWARD, WAITING, PAUSE = range(5)
"""Parts of a window's time; a pause (a validation) is no part of it."""
NEWEST = 64
"""Windows that are kept until they are looked at."""

_END = object()
_Tape = list[tuple[int, int, TimedEvent, TimedEvent]]
"""Part, depth, begin, end; inner ones come first."""


class StepTimes:
    """Measures the windows of a fit, by the clock of the host.

    The methods that take the time are replaced by timed ones, as a profiler does it, so that a run that measures
    nothing pays nothing. Time counts for the innermost part: what a backward waits is no part of it.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._windows: deque[tuple[WindowTimes, int]] = deque(maxlen=NEWEST)
        self._seconds = [0.0] * 5
        self._inner = [0.0]  # seconds of the timed calls inside the one that runs
        self._since = clock()
        self._end = ExitStack()
        self._source: object = None

    # -- what is measured

    @contextmanager
    def attached(self, strategy: Strategy, step: Step, validation: EvaluationLoop) -> Iterator[None]:
        """Inside, windows are measured.

        Args:
            strategy: of the fit, set up.
            step: of the fit.
            validation: of the fit; it is no part of a window.
        """
        self._replace(step, "training_step", FORWARD)
        self._replace(strategy, "backward", BACKWARD)
        self._replace(validation, "evaluate", PAUSE)
        for owner, name in strategy.waits_in:
            self._replace(owner, name, WAITING)
        with self._end, wrapped(lambda name, fn: self.timed(WAITING, fn), WAITS):
            yield

    def attach_source(self, source: LoaderSource) -> None:
        """Measure how long batches of these loaders are waited for; once for each."""
        if source is self._source:
            return
        self._source = source
        for name in ("open", "weighed"):
            setattr(source, name, self._timed_opening(getattr(source, name)))

    def timed(self, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, whose time counts for a part of the window."""
        seconds, inner, clock, mine = self._seconds, self._inner, self.clock, get_ident()
        anywhere = part == WAITING  # torch's collectives; the others are called by the loop alone

        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
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
        """What comes from here on is of the window to come: an epoch begins."""
        self._since = self.clock()
        self._seconds[:] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def end_window(self, samples: float, kind: int) -> None:
        """A window is over.

        Args:
            samples: of this rank in it.
            kind: for :meth:`take`, which tells windows of one kind apart.
        """
        now, seconds = self.clock(), self._seconds
        data, forward, backward, waiting, pause = seconds
        other = now - self._since - data - forward - backward - waiting - pause
        self._windows.append((WindowTimes(samples, data, forward, backward, waiting, other), kind))
        self._since = now
        seconds[:] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def take(self, kind: int) -> tuple[list[WindowTimes], list[float]]:
        """The windows since this was asked last, and the seconds of those of a kind, without waiting."""
        found = list(self._windows)
        self._windows.clear()
        return [window for window, _ in found], [window.busy for window, of in found if of == kind]


# -- on a GPU --------------------------------------------------------------------------------------------------


class DeviceTimes(StepTimes):
    """The same by events in a device's work, which the host is ahead of; nobody waits for the device.

    Forward, backward and waiting are what they take the device. Fetching data counts as far as the device has nothing
    to do meanwhile.

    Args:
        clock: of the host.
        make_event: an event that knows its time.
        stream: tells the stream that is current; what another does is not the step's work.
    """

    def __init__(
        self, clock: Callable[[], float], make_event: Callable[[], TimedEvent], stream: Callable[[], object]
    ) -> None:
        super().__init__(clock)
        self._make, self._stream, self._own_stream = make_event, stream, stream()
        self._tape: _Tape = []  # part, depth, begin, end; inner ones come first
        self._depth = 0
        self._last = self._now()
        self._pending: deque[tuple[float, int, float, _Tape, TimedEvent, TimedEvent]] = deque()

    @classmethod
    def of(cls, device: torch.device, clock: Callable[[], float]) -> DeviceTimes:
        """Of a device that notes the time at which it comes to an event; it is the current one of its kind."""
        stream = functools.partial(current_stream, device) if has_streams(device) else str
        return cls(clock, functools.partial(timed_event, device), stream)

    def _now(self) -> TimedEvent:
        event = self._make()
        event.record()
        return event

    def timed(self, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, whose time counts for a part of the window; fetching data by the host's clock."""
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
        """What comes from here on is of the window to come: an epoch begins."""
        super().begin()
        self._tape, self._last = [], self._now()

    def end_window(self, samples: float, kind: int) -> None:
        """A window is over on the host; the device may be behind."""
        end = self._now()
        self._pending.append((samples, kind, self._seconds[DATA], self._tape, self._last, end))
        self._seconds[DATA] = 0.0
        self._tape, self._last = [], end
        if len(self._pending) > NEWEST:
            self._pending.popleft()

    def take(self, kind: int) -> tuple[list[WindowTimes], list[float]]:
        """The windows since this was asked last that the device is through with."""
        while self._pending and self._pending[0][-1].query():
            samples, of, data, tape, begin, end = self._pending.popleft()
            seconds = _own_seconds(tape)
            idle = begin.elapsed_time(end) / 1e3 - sum(seconds)
            data = max(0.0, min(data, idle))
            _, forward, backward, waiting, _ = seconds
            self._windows.append((WindowTimes(samples, data, forward, backward, waiting, max(0.0, idle - data)), of))
        return super().take(kind)


def _own_seconds(tape: _Tape) -> list[float]:
    """Seconds of each part, without those of the calls inside; what is inside comes first."""
    seconds, inside = [0.0] * 5, [0.0]
    for part, depth, begin, end in tape:
        inside += [0.0] * (depth + 2 - len(inside))
        elapsed = begin.elapsed_time(end) / 1e3
        seconds[part] += elapsed - inside[depth + 1]
        inside[depth + 1] = 0.0
        inside[depth] += elapsed
    return seconds
