"""Profilers, which measure the parts of a run. This file only re-exports their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late

if TYPE_CHECKING:
    from lockstep.profilers.base import (
        AdvancedProfiler as AdvancedProfiler,
    )
    from lockstep.profilers.base import (
        PassThroughProfiler as PassThroughProfiler,
    )
    from lockstep.profilers.base import (
        Profiler as Profiler,
    )
    from lockstep.profilers.base import (
        SimpleProfiler as SimpleProfiler,
    )
    from lockstep.profilers.pytorch import PyTorchProfiler as PyTorchProfiler

_FILES = {
    "AdvancedProfiler": "base",
    "PassThroughProfiler": "base",
    "Profiler": "base",
    "PyTorchProfiler": "pytorch",
    "SimpleProfiler": "base",
}

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    """Import a profiler's file when its name is first used."""
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
