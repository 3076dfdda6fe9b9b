"""Devices of this process, by the module that torch has for their kind: which are here, which is the current one."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


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
