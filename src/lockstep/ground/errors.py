"""Exceptions that lockstep raises by name, and stand-ins that raise one on use."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class MisconfigurationException(ValueError, RuntimeError):
    """A setting, or a combination of settings, that cannot work.

    The message names the flag, the value and the way out. It is both a ``ValueError`` (the setting is wrong) and a
    ``RuntimeError`` (which code written for older trainers catches).
    """


class WrongType(MisconfigurationException, TypeError):
    """An argument of the wrong type, or with an unknown name; also a ``TypeError``."""


class NotThere(MisconfigurationException, AttributeError):
    """Error if there is nothing to act on, such as weights before the first fit. Also an ``AttributeError``."""


class KeyNotThere(MisconfigurationException, KeyError):
    """A required part of a checkpoint that is missing; also a ``KeyError``."""

    __str__ = Exception.__str__  # KeyError's own shows the message in quotes


class NonFiniteError(FloatingPointError):
    """A loss, a gradient or the weights of a fit are NaN or infinite."""


def words_of(error: BaseException) -> str:
    """Return the message of an exception; "" if its ``__str__`` fails, which would otherwise hide the exception."""
    try:
        return str(error)
    except Exception:
        return ""


class RankFailed(RuntimeError):
    """A failure of another rank that stops this rank too; the message names the rank, the place and the reason.

    It replaces the error of the collective whose peer is gone ("Connection closed by peer"), which is its
    ``__cause__``.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first; -1 if it is not known."""

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int]]:
        return type(self), (str(self), self.rank)


def raise_on_all(error: Exception | None, gather: Callable[[object], Sequence[Any]], what: str) -> None:
    """Raise on all ranks if one has an error: its own there, a `RankFailed` on the others. Collective.

    Args:
        error: this rank's error, or None.
        gather: returns an object of all ranks, by rank.
        what: name of the thing that could not be written.
    """
    reasons = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise RankFailed(f"rank {rank} could not write {what}: {reason}", rank)


class CorruptCheckpoint(RuntimeError):
    """A file that is truncated, altered or not a checkpoint."""


class MissingExtra(ModuleNotFoundError):
    """An optional package that is missing; the message names the feature that needs it and the extra to install."""


def missing_extra(package: str, extra: str, needed_for: str) -> MissingExtra:
    """Return the error for an optional package that is not installed.

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


def _asking() -> tuple[str, str]:
    """Return the package and place of the running code outside of lockstep and of the import system."""
    # The import system's frames are skipped, too: a name may be requested by an import statement.
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def asked_by() -> str:
    """Return the package, file and line of the running code outside of lockstep and of the import system."""
    package, place = _asking()
    return f"{'the script' if package in _SCRIPTS else package} ({place})"


_SCRIPTS = ("", "__main__", "__mp_main__")


def way_out() -> str:
    """Return advice for the user of a script, or of a package, that needs a missing part of Lightning."""
    package, _ = _asking()
    if package in _SCRIPTS:
        return "Do without it, or run the script with Lightning itself, without --lightning."
    return f"Leave out the part of {package} that needs it, or run with Lightning itself, without --lightning."


class Inner:
    """An inner part of Lightning's Trainer with a few attributes for third parties; access to others raises an error.

    Args:
        name: path from the Trainer, for the error.
        offers: factory of each available attribute, by name.
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
    """Return the error for a missing inner part of Lightning's Trainer; it names the code that reads it.

    Args:
        path: path to the part.
        does: verb for the access: "reads" or "sets".
    """
    return AttributeError(
        f"{path}, which {asked_by()} {does}, is an internal part of Lightning's Trainer that lockstep does not have. "
        f"{way_out()}"
    )


@functools.cache
def refused_class(name: str, reason: str) -> type:
    """Return a class that replaces a refused one: it has no instances, and its constructor raises the reason.

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
