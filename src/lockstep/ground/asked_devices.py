"""Values of ``Trainer(devices=...)``: how many devices one names, and which."""

from __future__ import annotations

from collections.abc import MutableSequence

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.whole_numbers import whole_number

Devices = int | str | list[int] | tuple[int, ...]


def count_of(devices: object) -> int | None:
    """The count that ``2`` or ``"2"`` stands for; None for lists, ``"0,2"`` and everything else."""
    if isinstance(devices, str):
        try:
            return int(devices)
        except ValueError:
            return None
    return whole_number(devices)


def _named(devices: Devices, present: int) -> list[int]:
    """The devices that a value of the flag names; none where it is no such value."""
    count = -1 if devices == "auto" else count_of(devices)
    if count is not None:
        return list(range(present if count == -1 else count))
    if isinstance(devices, str):
        try:
            return [int(part) for part in devices.split(",") if part.strip()]
        except ValueError:
            return []
    return list(devices) if isinstance(devices, MutableSequence | tuple) else []  # a config's own class of lists, too


def indices_of(devices: Devices, present: int, kind: str) -> list[int]:
    """Which of the devices 0 .. present - 1 were asked for."""
    indices = _named(devices, present)
    if not indices or any(type(index) is not int or index < 0 for index in indices):
        raise MisconfigurationException(
            f"devices={devices!r}: give a number, a list such as [0, 2], a string such as '0,2', -1 for all, or 'auto'"
        )
    if len(set(indices)) < len(indices):
        raise MisconfigurationException(
            f"devices={devices!r} names a device twice: give each one once, one rank works on each. Tests of several "
            "ranks on one card take Trainer(accelerator=lockstep.testing.SharedCard(), devices=2)"
        )
    if max(indices) >= present:
        raise MisconfigurationException(
            f"devices={devices!r}, but this machine has {present} {kind} device(s), numbered from 0: "
            f"use devices={present} or less, or -1 for all"
        )
    return indices
