"""Where the time of a step goes on this rank: fetching data, forward, backward, waiting for other ranks, the rest."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol

from torch.compiler import is_compiling

from lockstep.data.source import Source
from lockstep.ground.window_times import WindowTimes
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.strategies.base import Strategy
from lockstep.supervise.collective_trace import wrapped

DATA, FORWARD, BACKWARD, WAITING, PAUSE = range(5)
"""Parts of a window's time; a pause (a validation) is no part of it."""
NEWEST = 64
"""Windows that are kept until they are looked at."""

_END = object()


class Windows(Protocol):
    """What plays the windows of a fit: see `lockstep.loop.step.Step`."""

    training_step: Callable[..., Any]


class StepTimes:
    """Measures the windows of a fit, by the clock of the host.

    The methods that take the time are replaced by timed ones, as a profiler does it, so that a run that measures
    nothing pays nothing. Time counts for the innermost part: what a backward waits is no part of it.

    Args:
        clock: seconds.

    Attributes:
        windows: the newest ones, until somebody takes them out.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.windows: deque[WindowTimes] = deque(maxlen=NEWEST)
        self._seconds = [0.0] * 5
        self._inner = [0.0]  # seconds of the timed calls inside the one that runs
        self._since = clock()
        self._undo: list[Callable[[], object]] = []
        self._source: object = None

    # -- what is measured

    @contextmanager
    def attached(self, strategy: Strategy, step: Windows, validation: EvaluationLoop) -> Iterator[None]:
        """Inside, windows are measured.

        Args:
            strategy: of the fit, set up.
            step: of the fit, set up.
            validation: of the fit; it is no part of a window.
        """
        self._replace(step, "training_step", FORWARD)
        self._replace(strategy, "backward", BACKWARD)
        self._replace(validation, "evaluate", PAUSE)
        for owner, name in strategy.waits_in():
            self._replace(owner, name, WAITING)
        try:
            with wrapped(functools.partial(self.timed, WAITING)):
                yield
        finally:
            while self._undo:
                self._undo.pop()()

    def attach_source(self, source: Source) -> None:
        """Measure how long batches of these loaders are waited for; once for each."""
        if source is self._source:
            return
        self._source = source
        for name in ("open", "weighed"):
            setattr(source, name, self._timed_opening(getattr(source, name)))

    def timed(self, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, whose time counts for a part of the window."""
        seconds, inner, clock, mine = self._seconds, self._inner, self.clock, get_ident()

        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != mine or is_compiling():
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
        own, before = name in vars(owner), getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before) if own else vars(owner).pop(name, None))
        setattr(owner, name, self.timed(part, before))

    def _timed_opening(self, opening: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def opened(*args: Any, **kwargs: Any) -> Iterator[Any]:
            return _Timed(iter(opening(*args, **kwargs)), self)

        return opened

    # -- windows

    def begin(self) -> None:
        """What comes from here on is of the window to come: an epoch begins."""
        self._since = self.clock()
        self._seconds[:] = [0.0] * 5

    def end_window(self, samples: float) -> WindowTimes:
        """A window is over, with so many samples of this rank."""
        now, seconds = self.clock(), self._seconds
        data, forward, backward, waiting, pause = seconds
        other = now - self._since - data - forward - backward - waiting - pause
        found = WindowTimes(samples, data, forward, backward, waiting, other)
        self.windows.append(found)
        self._since = now
        seconds[:] = (0.0, 0.0, 0.0, 0.0, 0.0)
        return found

    def take(self) -> list[WindowTimes]:
        """The windows since this was asked last."""
        found = list(self.windows)
        self.windows.clear()
        return found


class _Timed:
    """An iterator whose steps count as fetching data."""

    def __init__(self, items: Iterator[Any], times: StepTimes) -> None:
        self._next = times.timed(DATA, items.__next__)

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        return self._next()
