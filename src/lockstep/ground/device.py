"""Functions for devices of any kind, which call torch's module for the kind of device, such as ``torch.cuda``.

They list devices, select the current one, report supported dtypes, create streams and events, and create modules and
tensors on a device.
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
    """Return torch's module for a kind of device, such as ``torch.cuda``, ``torch.mps`` or ``torch.cpu``.

    Raises:
        RuntimeError: this torch has no module of that name.
    """
    return torch.get_device_module(torch.device(device).type)


def accelerator_kinds() -> list[str]:
    """Return the kinds of accelerators that this build of torch supports, without initializing any.

    A machine need not have such a device.
    """
    found = torch.accelerator.current_accelerator()
    return list(dict.fromkeys(["cuda"] if found is None else ["cuda", found.type]))


def in_bad_fork() -> bool:
    """Return True if this process cannot use accelerators, because it was forked after one had been initialized."""
    return any(getattr(device_module(kind), "_is_in_bad_fork", bool)() for kind in accelerator_kinds())


def is_there(kind: str) -> bool:
    """Return True if this machine has a device of a kind and this build of torch supports it."""
    try:
        return kind == "cpu" or bool(device_module(kind).is_available())
    except RuntimeError:  # torch does not know this kind, or has no module for it
        return False


def devices_of(kind: str, started: bool = False) -> list[torch.device]:
    """Return a list of all devices of a kind, in the order of their indices.

    Args:
        kind: "cuda", "mps".
        started: return an empty list, without initializing the kind, if this process has not used it yet.
    """
    module = device_module(kind)
    there = getattr(module, "is_initialized", module.is_available) if started else module.is_available
    return [torch.device(kind, index) for index in range(module.device_count())] if there() else []


def current_of(kind: str) -> torch.device:
    """Return the current device of a kind in this process."""
    asks = getattr(device_module(kind), "current_device", None)
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0 if asks is None else int(asks()))


def make_current(device: torch.device) -> None:
    """Make ``device`` the current device of its kind in this process. Do nothing for a kind with one device."""
    # Kinds with a single device, such as mps, lack the function.
    choose = getattr(device_module(device), "set_device", None)
    if device.type != "cpu" and choose is not None:
        choose(device)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is current, for kernels and events that use the current device."""
    made = None if device.type == "cpu" else getattr(device_module(device), "device", None)
    return nullcontext() if made is None else made(device)


def synchronize(device: torch.device) -> None:
    """Block until a device has finished all queued work."""
    if device.type != "cpu":
        # `torch.mps` has one device and takes no argument
        device_module(device).synchronize(*[device][: device.type != "mps"])


def device_name(device: torch.device) -> str:
    """Return the product name of a device, or its kind if there is no name."""
    if device.type == "cpu":
        return platform.processor() or "cpu"
    named = getattr(device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


@cache
def has_float64(kind: str) -> bool:
    """Return True if a kind of device supports float64."""
    # Known without the tensor below, which would initialize the device.
    if kind in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.ones((), dtype=torch.float64, device=kind) + 1
    except (RuntimeError, TypeError, AssertionError):  # AssertionError: torch was built without such devices
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """Return the most precise dtype that a device supports for sums: float64, or else float32."""
    return torch.float64 if has_float64(device.type) else torch.float32


def has_autocast(kind: str, dtype: torch.dtype) -> bool:
    """Return True if a kind of device supports ``torch.autocast`` to a dtype."""
    if kind == "cuda" or not torch.amp.is_autocast_available(kind):
        return kind == "cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if it leaves autocast off
        try:
            torch.autocast(kind, dtype=dtype)
        except (UserWarning, RuntimeError):
            return False
    return True


def has_streams(device: torch.device) -> bool:
    """Return True if a device supports several streams that wait for each other through events."""
    return device.type != "cpu" and all(hasattr(device_module(device), name) for name in ("Stream", "stream", "Event"))


def new_stream(device: torch.device) -> Any:
    """Create a stream on a device that supports streams."""
    return device_module(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return this thread's current stream on a device that supports streams."""
    return device_module(device).current_stream(device)


def in_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which a device's computations are queued on ``stream``."""
    made: AbstractContextManager[Any] = device_module(stream.device).stream(stream)
    return made


def has_timed_events(device: torch.device) -> bool:
    """Return True if a device supports events that record their time without blocking the host."""
    return device.type != "cpu" and hasattr(device_module(device), "Event")


class TimedEvent(Protocol):
    """An event in a device's queue that records the time at which the device reaches it; see `torch.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float:
        """Return the time from this event to a later event, in milliseconds."""
        ...


def timed_event(device: torch.device) -> TimedEvent:
    """Create an event that records its time, for the current device of the same kind as ``device``."""
    return device_module(device).Event(enable_timing=True)


@contextmanager
def creating(
    device: torch.device, dtype: torch.dtype | None = None, empty: bool = False, in_parts: bool = False
) -> Iterator[None]:
    """Create new modules and tensors on ``device`` inside the block.

    Args:
        device: default device of new tensors.
        dtype: default dtype of new floating-point tensors; None: torch's default.
        empty: skip the functions of ``torch.nn.init``; for weights that are loaded from a checkpoint.
        in_parts: True if this rank gets only shards of the module. With ``empty`` no memory is allocated (meta device).
    """
    if empty and in_parts:
        # On the meta device nothing is drawn: `torch.nn.init` need not be skipped.
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
    """Torch function mode in which the functions of ``torch.nn.init`` leave their tensors unchanged."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
