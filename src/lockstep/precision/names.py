"""The values of ``Trainer(precision=...)`` and what they stand for."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.ground.errors import MisconfigurationException
from lockstep.precision.base import Precision
from lockstep.precision.mixed import MixedPrecision
from lockstep.precision.true import TruePrecision

PRECISIONS: dict[str, Callable[[str, str], Precision]] = {
    "64-true": TruePrecision,
    "32-true": lambda name, device_type: Precision(device_type),
    "bf16-mixed": MixedPrecision,
    "16-mixed": MixedPrecision,
    "bf16-true": TruePrecision,
    "16-true": TruePrecision,
}
"""Name to what makes it from (name, device type)."""

ALIASES = {"64": "64-true", "32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
"""Shorter spellings; numbers count as their text."""


def precision_name(flag: str | int | None) -> str:
    """The full name of a ``precision`` flag; None is ``32-true``.

    Raises:
        MisconfigurationException: there is no such precision.

    Example:
        >>> precision_name(64), precision_name("bf16")
        ('64-true', 'bf16-mixed')
    """
    name = "32-true" if flag is None else str(flag)
    name = ALIASES.get(name, name)
    if name not in PRECISIONS or isinstance(flag, bool):
        raise MisconfigurationException(
            f"precision={flag!r} is not known: use one of {', '.join(map(repr, PRECISIONS))}"
        )
    return name


def make_precision(flag: str | int | None, device_type: str = "cpu") -> Precision:
    """The precision that a flag stands for, on a type of device.

    Args:
        flag: a name in `PRECISIONS`, a short one in `ALIASES`, or None.
        device_type: ``"cpu"``, ``"cuda"`` or ``"mps"``.

    Raises:
        MisconfigurationException: there is no such precision, or not on this device.
    """
    name = precision_name(flag)
    return PRECISIONS[name](name, device_type)
