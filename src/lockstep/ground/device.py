"""Devices of this process, by the module that torch has for their kind.

Which are here and which is the current one, the numbers that a kind computes with, streams with the events and futures
by which they wait for one another, and modules and tensors that are made on a device.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode


def device_module(device: torch.device | str) -> Any:
    """torch's module for a kind of device: ``torch.cuda``, ``torch.mps``, ``torch.cpu``.

    Raises:
        RuntimeError: this torch has none of that name.
    """
    return torch.get_device_module(torch.device(device).type)


def accelerator_kinds() -> list[str]:
    """The kinds of accelerators that this torch knows of, whether one is here or not; asking starts none."""
    found = torch.accelerator.current_accelerator()
    return list(dict.fromkeys(["cuda"] if found is None else ["cuda", found.type]))


def in_bad_fork() -> bool:
    """Whether this process is a copy of one that had started an accelerator, which cannot be used here."""
    return any(getattr(device_module(kind), "_is_in_bad_fork", bool)() for kind in accelerator_kinds())


def is_there(kind: str) -> bool:
    """Whether this machine has a device of a kind, and this torch was built for it."""
    try:
        return kind == "cpu" or bool(device_module(kind).is_available())
    except RuntimeError:  # torch knows of no such kind, or has no module for it
        return False


def devices_of(kind: str, started: bool = False) -> list[torch.device]:
    """All devices of a kind, by their numbers.

    Args:
        kind: "cuda", "mps".
        started: none where this process has not begun to use them; asking then does not, either.
    """
    module = device_module(kind)
    there = getattr(module, "is_initialized", module.is_available) if started else module.is_available
    return [torch.device(kind, index) for index in range(module.device_count())] if there() else []


def current_of(kind: str) -> torch.device:
    """The device that the name of a kind stands for in this process."""
    asks = getattr(device_module(kind), "current_device", None)
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0 if asks is None else int(asks()))


def make_current(device: torch.device) -> None:
    """Let ``device`` be the one that its kind's name stands for in this process, where the kind can have several."""
    choose = getattr(device_module(device), "set_device", None)
    if device.type != "cpu" and choose is not None:
        choose(device)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, an accelerator is the current one, for kernels and events that do not ask where their tensors are."""
    made = None if device.type == "cpu" else getattr(device_module(device), "device", None)
    return nullcontext() if made is None else made(device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        # `torch.mps` has one device and takes no argument
        device_module(device).synchronize(*[device][: device.type != "mps"])


def device_name(device: torch.device) -> str:
    """The name that its maker gave a device, or its kind where nobody tells."""
    if device.type == "cpu":
        return platform.processor() or "cpu"
    named = getattr(device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


@cache
def has_float64(kind: str) -> bool:
    """Whether a kind of device computes in double precision."""
    if kind in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.ones((), dtype=torch.float64, device=kind) + 1
    except (RuntimeError, TypeError, AssertionError):  # the last one: torch was built without such devices
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """The dtype in which sums are taken on a device: float64, or float32 where it has no such."""
    return torch.float64 if has_float64(device.type) else torch.float32


def has_autocast(kind: str, dtype: torch.dtype) -> bool:
    """Whether a kind of device has ``torch.autocast`` to a dtype."""
    if kind == "cuda" or not torch.amp.is_autocast_available(kind):
        return kind == "cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # by which torch says that it leaves autocast off
        try:
            torch.autocast(kind, dtype=dtype)
        except (UserWarning, RuntimeError):
            return False
    return True


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


@contextmanager
def creating(
    device: torch.device, dtype: torch.dtype | None = None, empty: bool = False, in_parts: bool = False
) -> Iterator[None]:
    """Within the block, modules and tensors are made on ``device``.

    Args:
        device: of what names none itself.
        dtype: of floating tensors that name none themselves; None: torch's default.
        empty: leave the memory of parameters as it is, where ``torch.nn.init`` would fill it; for weights that a
            checkpoint brings.
        in_parts: this rank will have parts of the module only: with ``empty`` it gets no memory at all (meta).
    """
    if empty and in_parts:
        device, empty = torch.device("meta"), False
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(device)
        if empty:
            stack.enter_context(_Uninitialized())
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        yield


class _Uninitialized(TorchFunctionMode):
    """Skips the functions of ``torch.nn.init``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
