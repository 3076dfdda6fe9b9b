"""The profiler that ``Trainer(profiler=...)`` asks for."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.profilers.base import Profiler, unknown_profiler


def make_profiler(flag: Profiler | str | None) -> Profiler | None:
    """The profiler of a flag.

    Args:
        flag: None, "simple", "advanced", "pytorch" (in any case of letters), or a profiler.

    Returns:
        None where nothing is to be recorded.

    Raises:
        MisconfigurationException: anything else.
    """
    if flag is None:
        return None
    if isinstance(flag, Profiler):
        return flag
    makers: dict[str, Callable[[], Profiler]] = {"simple": _simple, "advanced": _advanced, "pytorch": _pytorch}
    if not isinstance(flag, str) or flag.lower() not in makers:
        raise unknown_profiler(flag)
    return makers[flag.lower()]()


# Imported when they are asked for: cProfile and torch.profiler are not for runs that want none.


def _simple() -> Profiler:
    from lockstep.profilers.simple import SimpleProfiler

    return SimpleProfiler()


def _advanced() -> Profiler:
    from lockstep.profilers.advanced import AdvancedProfiler

    return AdvancedProfiler()


def _pytorch() -> Profiler:
    from lockstep.profilers.pytorch import PyTorchProfiler

    return PyTorchProfiler()
