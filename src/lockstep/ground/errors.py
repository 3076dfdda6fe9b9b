"""The exceptions that lockstep raises by name, and stand-ins that raise one when somebody uses them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class MisconfigurationException(ValueError, RuntimeError):
    """A setting, or a combination of settings, that cannot work.

    The message names the flag, the value and the way out. It is both a ``ValueError`` (what was asked for is
    wrong) and a ``RuntimeError`` (what code written for older trainers catches).
    """


class WrongType(MisconfigurationException, TypeError):
    """What was given is of a type, or by a name, that nothing takes: a ``TypeError``, too."""


class NotThere(MisconfigurationException, AttributeError):
    """What was asked for has nothing to act on: an ``AttributeError``, too."""


class KeyNotThere(MisconfigurationException, KeyError):
    """A part of a checkpoint that is needed and not in it: a ``KeyError``, too."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotes


class NonFiniteError(FloatingPointError):
    """A loss, a gradient or the weights of a fit are NaN or infinite."""


def words_of(error: BaseException) -> str:
    """What an exception says; "" where its class cannot tell: a ``__str__`` that fails would take its place."""
    try:
        return str(error)
    except Exception:
        return ""


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


def raise_on_all(error: Exception | None, gather: Callable[[object], Sequence[Any]], what: str) -> None:
    """An error of one rank is one on all, of which the others hear as of a `RankFailed`. Collective.

    Args:
        error: of this rank; None: it has none.
        gather: a small object of all ranks, by rank.
        what: could not be written.
    """
    told = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, said in enumerate(told):
        if said is not None:
            raise RankFailed(f"rank {rank} could not write {what}: {said}", rank)


class CorruptCheckpoint(RuntimeError):
    """A checkpoint file that is truncated, altered or no checkpoint at all."""


class MissingExtra(ModuleNotFoundError):
    """An optional package that is not installed; the message says what needs it and which extra brings it."""


def missing_extra(package: str, extra: str, needed_for: str) -> MissingExtra:
    """The error for an optional package that is not installed.

    Args:
        package: import name of what is missing.
        extra: the extra of ``torch-lockstep`` that brings it.
        needed_for: what the user asked for that needs it.
    """
    return MissingExtra(
        f'{needed_for} needs the package `{package}`, which is not installed: pip install "torch-lockstep[{extra}]" '
        f'(in a clone of lockstep: pip install ".[{extra}]")',
        name=package,
    )


# -- stand-ins for what is not there -------------------------------------------------------------------------


_OWN = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<frozen importlib")


def _asking() -> tuple[str, str]:
    """Return the package and place of the code outside of lockstep and of the import system that runs now."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def asked_by() -> str:
    """The package, file and line of the code outside of lockstep and of the import system that runs now."""
    package, place = _asking()
    return f"{'the script' if package in _SCRIPTS else package} ({place})"


_SCRIPTS = ("", "__main__", "__mp_main__")


def way_out() -> str:
    """Return what the user of a script, or of a package that asks for what lockstep lacks, can do."""
    package, _ = _asking()
    if package in _SCRIPTS:
        return "Do without it, or run the script with Lightning itself, without --lightning."
    return f"Leave out the part of {package} that needs it, or run with Lightning itself, without --lightning."


class Inner:
    """An inner part of Lightning's Trainer: what third parties may read there without harm, and an error for the rest.

    Args:
        name: as it is reached from the Trainer, for the error.
        offers: what there is, by name, and what makes it.
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
    """The error for an inner part of Lightning's Trainer that is not here; it names who reads it.

    Args:
        path: as it is reached.
        does: what is tried with it.
    """
    return AttributeError(
        f"{path}, which {asked_by()} {does}, is an inner part of Lightning's Trainer that lockstep does not have. "
        f"{way_out()}"
    )


@functools.cache
def refused_class(name: str, reason: str) -> type:
    """A class in the place of one that is refused: nothing is an instance of it, and making one raises the reason.

    Args:
        name: of the class. Exceptions and warnings are classes that nobody raises.
        reason: a sentence.
    """
    if name.endswith("Warning"):
        return type(name, (UserWarning,), {})
    if name.endswith(("Exception", "Error")):
        return type(name, (Exception,), {})

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        raise MisconfigurationException(f"{type(self).__name__}(...): {reason}")

    return type(name, (), {"__init__": __init__, "__doc__": reason, "is_available": staticmethod(lambda: False)})
