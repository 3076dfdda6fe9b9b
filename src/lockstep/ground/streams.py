"""Streams of a device, and the events and futures by which they wait for one another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.ground.device import current_of, device_module


def has_streams(device: torch.device) -> bool:
    """Whether work on a device can be put into several streams, which wait for one another by events."""
    return device.type != "cpu" and all(hasattr(device_module(device), name) for name in ("Stream", "stream", "Event"))


def new_stream(device: torch.device) -> Any:
    """A stream of a device that has such."""
    return device_module(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """The stream into which this thread puts what it computes on a device that has streams."""
    return device_module(device).current_stream(device)


def in_stream(stream: Any) -> AbstractContextManager[Any]:
    """Inside, what is computed goes into ``stream``."""
    made: AbstractContextManager[Any] = device_module(stream.device).stream(stream)
    return made


@cache
def has_futures(kind: str) -> bool:
    """Whether ``torch.futures`` knows a kind of device: the stream of who waits for one waits for that of who set."""
    if kind in ("cpu", "cuda"):
        return kind == "cuda"
    try:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[current_of(kind)])
        future.set_result(torch.empty(1, device=current_of(kind)))
        future.wait()
    except RuntimeError:
        return False
    return True


def has_timed_events(device: torch.device) -> bool:
    """Whether a device notes the time at which it comes to an event, so that nobody waits for it."""
    return device.type != "cpu" and hasattr(device_module(device), "Event")


class TimedEvent(Protocol):
    """A point in the work of a device: see `torch.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to a later one."""
        ...


def timed_event(device: torch.device) -> TimedEvent:
    """An event that knows its time, of a device that has such; it belongs to the current one of the kind."""
    return device_module(device).Event(enable_timing=True)
