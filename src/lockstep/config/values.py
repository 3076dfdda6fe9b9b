"""Checks of one flag's value: each gives the value back in its plain form, or says what to give instead."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from lockstep.ground.errors import MisconfigurationException


def switch(flag: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, (bool, int)) or value not in (True, False):
        raise MisconfigurationException(f"Trainer({flag}={value!r}): give True or False.")
    return bool(value)


def whole(flag: str, value: Any, *, at_least: int) -> int | None:
    """A whole number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        meaning = " (-1 means no limit)" if at_least == -1 else ""
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give a whole number of at least {at_least}{meaning}."
        )
    return value


def fraction_or_count(flag: str, value: int | float | None, *, zero: bool = True) -> int | float:
    """A number of batches (an int; a float above 1 without a fraction counts as one), or a part of them (a float)."""
    if value is None:
        return 1.0
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    if good and isinstance(value, float) and value > 1.0 and value.is_integer():
        return int(value)
    if not good or (isinstance(value, float) and value > 1.0) or (not zero and value == 0):
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give a number of batches (an int) or a fraction of the loader "
            "(a float between 0.0 and 1.0)."
        )
    return value


def interval(flag: str, value: Any) -> int | float | timedelta:
    """A number of batches, a part of an epoch, or a time."""
    if isinstance(value, (str, dict, timedelta)):
        found = duration(flag, value)
        assert found is not None
        return found
    return fraction_or_count(flag, value, zero=False)


def choice(flag: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """One of the choices."""
    if value not in choices:
        raise MisconfigurationException(f"Trainer({flag}={value!r}): choose one of {', '.join(map(repr, choices))}.")
    return value


def accumulation(value: int | dict[int, int]) -> int | dict[int, int]:
    """Micro-batches of a window, or a dict from the first epoch to that."""
    table = value if isinstance(value, dict) else {0: value}
    for epoch, batches in table.items():
        good = all(isinstance(n, int) and not isinstance(n, bool) for n in (epoch, batches))
        if not good or epoch < 0 or batches < 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={value!r}): give an int of at least 1, or a dict from the first "
                "epoch (counted from 0) to the micro-batches of a step from then on, such as {0: 8, 5: 4}."
            )
    return value


def duration(flag: str, value: str | timedelta | dict[str, int] | None) -> timedelta | None:
    """A length of time, or None."""
    if value is None:
        return None
    try:
        if isinstance(value, timedelta):
            length = value
        elif isinstance(value, dict):
            length = timedelta(**value)
        else:
            days, hours, minutes, seconds = (int(part) for part in value.strip().split(":"))
            length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if length < timedelta(0):
            raise ValueError
    except (TypeError, ValueError, AttributeError):
        raise MisconfigurationException(
            f'Trainer({flag}={value!r}): give "DD:HH:MM:SS", a datetime.timedelta, or its arguments as a dict '
            'such as {"hours": 2}.'
        ) from None
    return length


def seconds(flag: str, value: Any) -> float | None:
    """A length of time above 0, in seconds, or None for no limit."""
    found = value.total_seconds() if isinstance(value, timedelta) else value
    good = isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found < float("inf")
    if found is not None and not good:
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give seconds above 0, a datetime.timedelta, or None for off."
        )
    return None if found is None else float(found)


def folder(flag: str, value: Any) -> str:
    """The path of a folder, as text; it need not be there yet."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give the path of a folder, a str or a pathlib.Path; it is made when needed."
        )
    path = os.fspath(value)
    if os.path.exists(path) and not os.path.isdir(path):
        raise MisconfigurationException(f"Trainer({flag}={path!r}): there is a file of this name; give a folder.")
    return path


def check_writable(flag: str, path: str) -> None:
    """Refuse a folder, or the one above it where it is to be made, that this user may not write to."""
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise MisconfigurationException(
            f"Trainer({flag}={path!r}): logs and checkpoints are to go there, and {there!r} cannot be written to: "
            f"give `{flag}` another folder, or set logger=False and enable_checkpointing=False."
        )
