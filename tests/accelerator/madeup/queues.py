"""Queues of work that a thread does while the host goes on; the host's waits, which are counted; streams and events.

A lane is a queue with a thread, which lives only as long as there is work. A stream is a lane of a device. Work on one
stream runs in order; two streams know nothing of each other, unless one waits for an event of the other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.accelerator.madeup.settings import NAME, settings

# -- lanes ---------------------------------------------------------------------------------------------------


class Lane:
    """Work that is done in order, in a thread that ends when there is none.

    Attributes:
        error: what failed first. All that is queued behind it is dropped, and whoever waits for the lane gets it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._items: deque[Callable[[], object]] = deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether something is queued or runs."""
        return bool(self._items)

    def put(self, item: Callable[[], object]) -> None:
        """Do ``item`` after all that is queued; the caller goes on."""
        with self._change:
            self._items.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"{NAME}: {self.name}", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            item = self._items[0]
            try:
                if self.error is None or isinstance(item, Mark):
                    with torch.inference_mode():  # what is written may be a tensor of that mode
                        item()
            except BaseException as error:  # it is raised where the host waits
                self.error = error
            del item
            with self._change:
                self._items.popleft()
                self._change.notify_all()
                if not self._items:
                    self._thread = None
                    return

    def drain(self) -> None:
        """Stop the caller until all that is queued has run; raises what failed in it."""
        with self._change:
            while self._items:
                self._change.wait(0.5)  # a signal's handler runs in between
        self.check()

    def check(self) -> None:
        """Raise what failed."""
        if self.error is not None:
            raise RuntimeError(f"{NAME}: queued work has failed: {self.error!r}") from self.error


class Mark:
    """A point in a lane's work, and when it was reached; it is reached even where the work before it failed."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.at = 0.0

    def __call__(self) -> None:
        self.at = time.perf_counter()
        self._reached.set()

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def wait(self) -> None:
        """Stop the calling thread until the lane has come here."""
        while not self._reached.wait(0.5):
            pass

    @staticmethod
    def behind(lane: Lane) -> Mark:
        """A mark behind all that is queued now."""
        mark = Mark()
        if lane.busy:
            lane.put(mark)
        else:
            mark()
        return mark


# -- what the host waits for -----------------------------------------------------------------------------------


waits: Counter[str] = Counter()
"""How often the host has waited for a device in this process, by the reason."""
_watches: list[list[tuple[str, str]]] = []
debug_mode = "default"
"""As CUDA's: "warn" says each wait in a warning."""


def count_wait(why: str) -> None:
    """Note that the host waits for a device, for the line of Python that asked."""
    waits[why] += 1
    if debug_mode == "warn":
        warnings.warn(f"called a synchronizing {NAME} operation", stacklevel=2)
    if _watches:
        line = _asking_line()
        for watch in _watches:
            watch.append((why, line))


@contextmanager
def watched_waits() -> Iterator[list[tuple[str, str]]]:
    """The host's waits inside: the reason, and the line outside torch and this device that asked."""
    watch: list[tuple[str, str]] = []
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


def _asking_line() -> str:
    frame: Any = sys._getframe(2)
    skipped = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- streams and events ----------------------------------------------------------------------------------------


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, *, default: bool = False, **_: object) -> None:
        self.device = torch.device(NAME, number(device))
        self.priority = priority
        self.lane = Lane(f"{'default ' if default else ''}stream of {self.device}")
        self._before: list[tuple[int, Stream]] = []
        if not default:
            _others.add(self)

    @property
    def device_index(self) -> int:
        return self.device.index

    @property
    def stream_id(self) -> int:
        return id(self)

    def synchronize(self) -> None:
        count_wait("stream.synchronize")
        self.lane.drain()

    def query(self) -> bool:
        return not self.lane.busy

    def wait_event(self, event: Event) -> None:
        if event.mark is not None and not event.mark.reached:
            self.lane.put(event.mark.wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before.append((current.device, current.stream(self.device.index)))
        current.device = self.device.index
        current.streams[self.device.index] = self
        return self

    def __exit__(self, *_: object) -> None:
        current.device, stream = self._before.pop()
        current.streams[self.device.index] = stream


class Event:
    """As `torch.cuda.Event`; times are those at which the stream came to it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.mark: Mark | None = None
        self._timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        stream = current.stream(current.device) if stream is None else stream
        self.mark = Mark.behind(stream.lane)

    def query(self) -> bool:
        return self.mark is None or self.mark.reached

    def wait(self, stream: Stream | None = None) -> None:
        (current.stream(current.device) if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        count_wait("event.synchronize")
        if self.mark is not None:
            self.mark.wait()

    def elapsed_time(self, other: Event) -> float:
        if not (self._timing and other._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.mark is None or other.mark is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.mark.reached and other.mark.reached):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000 * (other.mark.at - self.mark.at)


class _Current(threading.local):
    """The device and the streams that a thread has chosen."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}

    def stream(self, index: int) -> Stream:
        return self.streams.get(index) or default_stream(index)


current = _Current()
_defaults: dict[int, Stream] = {}
_others: weakref.WeakSet[Stream] = weakref.WeakSet()


def default_stream(index: int) -> Stream:
    """The stream of those who have not chosen one."""
    stream = _defaults.get(index)
    return _defaults.setdefault(index, Stream(index, default=True)) if stream is None else stream


def number(device: Any = None) -> int:
    """The device's number; of "madeup" alone that of the current device."""
    if isinstance(device, int):
        index: int | None = device
    elif device is None:
        index = None
    elif isinstance(device, Stream):
        index = device.device.index
    else:
        index = torch.device(device).index
    index = current.device if index is None else index
    if not 0 <= index < settings.count:
        raise RuntimeError(f"{NAME}: invalid device number {index}: there are {settings.count}")
    return index


def lane_of(index: int) -> Lane:
    """Of the current stream of a device."""
    return current.stream(index).lane


def synchronize(device: Any = None, why: str = "synchronize") -> None:
    """The host waits for all streams of a device."""
    index = number(device)
    count_wait(why)
    for stream in [default_stream(index), *_others]:
        if stream.device.index == index:
            stream.lane.drain()


def sleep(seconds: float, device: Any = None) -> None:
    """A device's current stream is busy for so long; the host goes on."""
    lane_of(number(device)).put(lambda: time.sleep(seconds))


def block(device: Any = None) -> Callable[[], None]:
    """A device's current stream is busy until what this returns is called."""
    gate = threading.Event()
    lane_of(number(device)).put(gate.wait)
    return gate.set


def forget() -> None:
    """In a forked process: no thread has come along."""
    _defaults.clear()
    _others.clear()
    current.device, current.streams = 0, {}
    waits.clear()
