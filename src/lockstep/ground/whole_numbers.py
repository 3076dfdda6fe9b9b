"""Whole numbers, as scripts and configs write them."""

from __future__ import annotations

from operator import index


def whole_number(value: object) -> int | None:
    """Return a whole number as an int, also one that is written as a float (1e3); None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return index(value)  # type: ignore[arg-type]  # an int, or one of NumPy's
    except TypeError:
        return None
