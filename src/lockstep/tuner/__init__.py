"""Tuner, which finds settings before a fit: a learning rate, and the largest batch that fits the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late, listed

if TYPE_CHECKING:
    from lockstep.extensions.extras.tuner.tuning import Tuner as Tuner

__all__ = listed(__name__, {})


def __getattr__(name: str) -> Any:
    """Import the file that defines ``name`` when the name is first used."""
    return late(__name__, {}, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
