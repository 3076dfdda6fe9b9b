"""The exception classes of lockstep, and stand-ins for missing parts that raise an exception on use."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class MisconfigurationException(ValueError, RuntimeError):
    """Error for a setting, or a combination of settings, that cannot work.

    The message names the flag, the value and the way out. It is both a ``ValueError`` (the setting is wrong) and a
    ``RuntimeError`` (which code written for older trainers catches).
    """


class WrongType(MisconfigurationException, TypeError):
    """Error for an argument of the wrong type or for an unknown name. The error is also a ``TypeError``."""


class MissingAttribute(MisconfigurationException, AttributeError):
    """Error for the use of an object that does not exist yet, such as weights before a fit. An ``AttributeError``."""


class MissingKey(MisconfigurationException, KeyError):
    """Error for a checkpoint that lacks a required entry. The error is also a ``KeyError``."""

    __str__ = Exception.__str__  # KeyError's own shows the message in quotes


class NonFiniteError(FloatingPointError):
    """Error for a loss, gradient or weight that is NaN or infinite."""


def words_of(error: BaseException) -> str:
    """Return the message of an exception; "" if its ``__str__`` raises another exception."""
    try:
        return str(error)
    except Exception:
        return ""


class RankFailed(RuntimeError):
    """Error that a rank raises because another rank has failed. The message names that rank, the place and the reason.

    It replaces the error of the collective whose peer is gone ("Connection closed by peer"), which is its
    ``__cause__``.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first; -1 if it is unknown."""

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int]]:
        return type(self), (str(self), self.rank)


def raise_on_all(error: Exception | None, gather: Callable[[object], Sequence[Any]], what: str) -> None:
    """Raise on all ranks if any rank failed to write ``what``. ``error`` is this rank's error or None. Collective.

    A rank with an error raises that error; the other ranks raise `RankFailed`.

    Args:
        error: this rank's error, or None.
        gather: function that returns the objects of all ranks, ordered by rank.
        what: name of the thing that could not be written.
    """
    reasons = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise RankFailed(f"rank {rank} could not write {what}: {reason}", rank)


class CorruptCheckpoint(RuntimeError):
    """Error for a checkpoint file that is truncated, altered or not a checkpoint."""


class MissingExtra(ModuleNotFoundError):
    """Error for an optional package that is not installed. The message names the feature and the extra to install."""


def missing_extra(package: str, extra: str, needed_for: str) -> MissingExtra:
    """Create the error for an optional package that is not installed.

    Args:
        package: import name of the missing package.
        extra: the extra of ``torch-lockstep`` that installs it.
        needed_for: the feature that needs it.
    """
    return MissingExtra(
        f'{needed_for} needs the package `{package}`, which is not installed: pip install "torch-lockstep[{extra}]" '
        f'(in a clone of lockstep: pip install ".[{extra}]")',
        name=package,
    )


# -- stand-ins for missing parts ------------------------------------------------------------------------------


_OWN = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<frozen importlib")


def _find_caller() -> tuple[str, str]:
    """Return (package, "file:line") of the innermost caller outside of lockstep and Python's import system."""
    # The import system's frames are skipped, too: a name may be requested by an import statement.
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def calling_code() -> str:
    """Describe the innermost caller outside of lockstep and the import system: its package, file and line."""
    package, place = _find_caller()
    return f"{'the script' if package in _SCRIPTS else package} ({place})"


_SCRIPTS = ("", "__main__", "__mp_main__")


def way_out() -> str:
    """Return advice for a user whose script, or a package used by it, needs a part of Lightning that lockstep lacks."""
    package, _ = _find_caller()
    if package in _SCRIPTS:
        return "Remove this use, or run the script with Lightning itself, without --lightning."
    return f"Do not use the part of {package} that needs it, or run with Lightning itself, without --lightning."


class Inner:
    """A stand-in for an internal part of Lightning's Trainer, with only the attributes that third parties use.

    Access to any other attribute raises an error.

    Args:
        name: path from the Trainer, for the error.
        offers: factories of the available attributes, by name.
    """

    def __init__(self, name: str, offers: Mapping[str, Callable[[], Any]]) -> None:
        self._name, self._offers = name, offers

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("_name", "_offers"):
            raise no_inner_part(f"{self._name}.{name}", "sets")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_name", "_offers"):
            raise AttributeError(name)
        if name in self._offers:
            return self._offers[name]()
        raise no_inner_part(f"{self._name}.{name}")


def no_inner_part(path: str, does: str = "reads") -> AttributeError:
    """Create the error for the use of ``path``, an internal part of Lightning's Trainer that lockstep lacks.

    The message has the line that uses the part.

    Args:
        path: path to the part.
        does: verb for the access: "reads" or "sets".
    """
    return AttributeError(
        f"{path}, which {calling_code()} {does}, is an internal part of Lightning's Trainer that lockstep does not "
        f"have. {way_out()}"
    )


@functools.cache
def refused_class(name: str, reason: str) -> type:
    """Create a class in place of an unsupported class of Lightning. Its constructor raises an error with the reason.

    Args:
        name: name of the class. Exceptions and warnings become plain classes that nothing raises.
        reason: a sentence.
    """
    if name.endswith("Warning"):
        return type(name, (UserWarning,), {})
    if name.endswith(("Exception", "Error")):
        return type(name, (Exception,), {})

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        raise MisconfigurationException(f"{type(self).__name__}(...): {reason}")

    return type(name, (), {"__init__": __init__, "__doc__": reason, "is_available": staticmethod(lambda: False)})
