"""The exceptions that lockstep raises by name."""

from __future__ import annotations


class MisconfigurationException(ValueError, RuntimeError):
    """A setting, or a combination of settings, that cannot work.

    The message names the flag, the value and the way out. It is both a ``ValueError`` (what was asked for is
    wrong) and a ``RuntimeError`` (what code written for older trainers catches).
    """


class RankFailed(RuntimeError):
    """Another rank has failed, so that this one cannot go on: the message says which, where and why.

    Raised in place of what a collective says when its peer is gone ("Connection closed by peer"), which is its
    ``__cause__``.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first; -1 if it is not known."""

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int]]:
        return type(self), (str(self), self.rank)


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
