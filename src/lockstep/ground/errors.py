"""The exceptions that lockstep raises by name."""

from __future__ import annotations


class MisconfigurationException(ValueError, RuntimeError):
    """A setting, or a combination of settings, that cannot work.

    The message names the flag, the value and the way out. It is both a ``ValueError`` (what was asked for is
    wrong) and a ``RuntimeError`` (what code written for older trainers catches).
    """


class CorruptCheckpoint(RuntimeError):
    """A checkpoint file that is truncated, altered or no checkpoint at all."""


def missing_extra(package: str, extra: str, needed_for: str) -> ModuleNotFoundError:
    """The error for an optional package that is not installed.

    Args:
        package: import name of what is missing.
        extra: the extra of ``torch-lockstep`` that brings it.
        needed_for: what the user asked for that needs it.
    """
    return ModuleNotFoundError(
        f"{needed_for} needs the package `{package}`, which is not installed: pip install "
        f'"torch-lockstep[{extra}]" (in a clone of lockstep: pip install -e ".[{extra}]")',
        name=package,
    )
