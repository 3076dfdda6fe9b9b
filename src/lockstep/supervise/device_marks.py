"""Detection of collectives that a device has completed, from events in its queue that a thread checks once a second.

A collective of a device's backend returns once it is queued. The rank waits later, when it reads a value.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lockstep.ground.installed import DEVICE_MARKS
from lockstep.supervise.trace_memory import TraceMemory

PERIOD = 1.0
"""Seconds between checks."""

MOST = 1024
"""Maximum number of pending events. Further collectives count as complete when their call returns."""


class DeviceMarks:
    """Detector of completed collectives in device queues. It records an event after each collective.

    Args:
        memory: the trace that records their ends.
    """

    def __init__(self, memory: TraceMemory) -> None:
        self._memory = memory
        self._open: deque[tuple[int, Any]] = deque()
        self._free: list[Any] = []
        self._new: dict[str, Callable[[], Any] | None] = {}
        self._thread: threading.Thread | None = None
        self._wakes = threading.Event()

    def put(self, index: int, device: str) -> bool:
        """Record an event in a device's queue after a collective. Return False if no event can be recorded.

        Args:
            index: index of the collective's note.
            device: device type, such as "cuda".
        """
        new = self._new.get(device)
        if new is None:
            if device in self._new:
                return False
            # a backend may have the class without being able to record: try it once
            try:
                new = torch.get_device_module(device).Event
                new().record()
            except (AttributeError, RuntimeError, NotImplementedError, AssertionError):
                new = None
            self._new[device] = new
            if new is None:
                return False
        if len(self._open) >= MOST:
            return False
        # an event in a captured graph would belong to the graph
        is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
        if is_capturing is not None and is_capturing():
            return False
        try:
            mark = self._free.pop()
        except IndexError:
            mark = device, new()
        if mark[0] != device:
            mark = device, new()
        mark[1].record()
        self._memory.queue(index)
        self._open.append((index, mark))
        if self._thread is None:
            self._memory.watched()
            DEVICE_MARKS.install(self._start)
        return True

    def _start(self) -> Callable[[], None]:
        self._thread = threading.Thread(target=self._run, name="lockstep-device-marks", daemon=True)
        self._thread.start()
        return self._wakes.set

    def check(self) -> None:
        """Mark the collectives that the device has completed as complete in the trace."""
        for _ in range(len(self._open)):
            index, mark = self._open.popleft()
            try:
                done = mark[1].query()
            except RuntimeError:
                # the device has failed, and its process is about to raise
                continue
            if done:
                self._memory.complete(index)
                self._free.append(mark)
            else:
                self._open.append((index, mark))
        self._memory.watched()

    def _run(self) -> None:
        while not self._wakes.wait(PERIOD):
            self.check()
