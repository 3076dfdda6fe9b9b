"""What the parts ask of a device: time without waiting, memory, and the places where the program waits for it."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

WAITS = "called a synchronizing"
"""What torch's warning says under ``set_sync_debug_mode``."""
MIB = 2**20


def module_of(device: str) -> Any:
    """``torch.cuda`` and its like for other devices; None for the CPU."""
    return None if device == "cpu" else torch.get_device_module(device)


def settle(device: str) -> None:
    """Wait for all that the device has to do."""
    module = module_of(device)
    if module is not None:
        module.synchronize()


def accelerator_of(device: str) -> str:
    """The name of a device for ``Trainer(accelerator=...)``."""
    return {"cuda": "gpu"}.get(device, device)


class Clock:
    """Moments on the device's own time line, none of which lets the program wait."""

    def __init__(self, device: str) -> None:
        self._module = module_of(device)
        self._device = device
        self._marks: list[Any] = []

    def tick(self) -> None:
        """One moment, when all that was asked for before is done."""
        if self._module is None:
            self._marks.append(time.perf_counter())
        else:
            event = self._module.Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def intervals(self) -> list[float]:
        """Milliseconds from each moment to the next."""
        settle(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._module is None:
            return [1e3 * (later - earlier) for earlier, later in pairs]
        return [earlier.elapsed_time(later) for earlier, later in pairs]


# -- memory --------------------------------------------------------------------------------------------------


def clear(device: str) -> None:
    """Forget garbage, cached memory and the peak so far."""
    import gc

    gc.collect()
    module = module_of(device)
    if module is not None:
        module.synchronize()
        module.empty_cache()
        module.reset_peak_memory_stats()


def peak(device: str) -> float | None:
    """The most MiB that tensors took since `clear`; None on a CPU."""
    module = module_of(device)
    return None if module is None else round(module.max_memory_allocated() / MIB, 1)


def in_use(device: str) -> float | None:
    """MiB that tensors take now; None on a CPU."""
    module = module_of(device)
    return None if module is None else round(module.memory_allocated() / MIB, 1)


# -- waits ---------------------------------------------------------------------------------------------------


class Waits:
    """How often the program has waited for the device, by place.

    Attributes:
        places: file and line of the innermost frame that is not torch's -> count; None where the
            device does not tell.
        armed: whether waits count now.
    """

    def __init__(self, tells: bool, armed: bool = True) -> None:
        self.armed = armed
        self.places: Counter[str] | None = Counter() if tells else None

    @property
    def total(self) -> int | None:
        """Of all places."""
        return None if self.places is None else sum(self.places.values())

    def a_step(self, steps: int) -> float | None:
        """Of all places, divided by the steps."""
        return None if self.total is None else round(self.total / steps, 2)


_PLACES_LEFT_OUT = (str(Path(torch.__file__ or "").parent), __file__, warnings.__file__, "<")


def place_of(frames: traceback.StackSummary, device: str) -> str:
    """``file.py:12 function`` of the innermost frame that is neither torch's nor of the device's own package."""
    file = getattr(sys.modules.get(type(module_of(device)).__module__), "__file__", None)
    left_out = (*_PLACES_LEFT_OUT, *([str(Path(file).parent)] if file else []))
    own = [frame for frame in frames if not frame.filename.startswith(left_out)]
    frame = own[-1] if own else frames[-1]
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}:{frame.lineno} {frame.name}"


@contextlib.contextmanager
def counted_waits(device: str, armed: bool = True, tells: bool | None = None) -> Iterator[Waits]:
    """Inside, each wait for the device is counted.

    Args:
        device: its type; CUDA tells of waits, as does what has ``set_sync_debug_mode``.
        armed: whether they count from the beginning, or once `Waits.armed` is set.
        tells: whether to listen; by default where the device tells.
    """
    set_mode = getattr(module_of(device), "set_sync_debug_mode", None)
    waits = Waits(set_mode is not None if tells is None else tells, armed)
    if waits.places is None:
        yield waits
        return
    places = waits.places

    def show(message: Any, *rest: Any, **more: Any) -> None:
        if waits.armed and WAITS in str(message):
            places[place_of(traceback.extract_stack(sys._getframe(1)), device)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        if set_mode is not None:
            set_mode("warn")
        try:
            yield waits
        finally:
            if set_mode is not None:
                set_mode("default")
