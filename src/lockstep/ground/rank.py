"""What only rank 0 does (calls, messages, warnings), and what a rank does that is in a function, in words.

The words are marks on functions, for whoever looks at the rank's stack. The supervisor of a node sees files, lines and
names of functions, of code that it has not imported. So the marks are read from the source.
"""

from __future__ import annotations

import ast
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from typing_extensions import ParamSpec

P = ParamSpec("P")
T = TypeVar("T")


LIGHTNINGS = ("lightning", "lightning.pytorch", "pytorch_lightning")
"""Lightning's loggers, which scripts that were written for it make quiet."""


class _Screen(logging.Handler):
    """Shows messages on stderr, as long as nobody has configured logging or given Lightning's a higher level."""

    def emit(self, record: logging.LogRecord) -> None:
        shown = max(
            record.levelno, logging.INFO
        )  # which is the level that Lightning gives its own, where it is imported
        if not logging.root.handlers and all(shown >= logging.getLogger(name).level for name in LIGHTNINGS):
            try:
                print(self.format(record), file=sys.stderr, flush=True)
            except Exception:  # its terminal is closed, or its disk is full: no message is worth the run
                self.handleError(record)


log = logging.getLogger("lockstep")
if not log.handlers:
    log.addHandler(_Screen())
if log.level == logging.NOTSET:  # else the user has set it before this file was imported
    log.setLevel(logging.INFO)


class _RankZeroOnly:
    """The decorator behind `rank_zero_only`; it also carries this process' global rank."""

    def __init__(self) -> None:
        self.rank: int = 0

    @overload
    def __call__(self, fn: Callable[P, T], default: T) -> Callable[P, T]: ...

    @overload
    def __call__(self, fn: Callable[P, T], default: None = None) -> Callable[P, T | None]: ...

    @overload
    def __call__(
        self, fn: None = None, default: object = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...

    def __call__(self, fn: Callable[..., Any] | None = None, default: object = None) -> Callable[..., Any]:
        if fn is None:
            return functools.partial(self.__call__, default=default)
        function = fn

        @functools.wraps(function)
        def on_rank_zero(*args: object, **kwargs: object) -> Any:
            return function(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = _RankZeroOnly()
"""Decorator: the function runs on global rank 0; elsewhere the call returns ``default``.

`rank_zero_only.rank` is the global rank of this process; the launch sets it, 0 until then. The rank is looked
up at each call, so decorating comes before or after the launch alike.

Example::

    @rank_zero_only
    def announce(text): print(text)

    @rank_zero_only(default=0)
    def files_written(): ...
"""


@rank_zero_only
def rank_zero_debug(message: object, *args: object, **kwargs: Any) -> None:
    """Log at debug level, on rank 0. Arguments as of `logging.Logger.debug`."""
    log.debug(message, *args, **_at_caller(kwargs))


@rank_zero_only
def rank_zero_info(message: object, *args: object, **kwargs: Any) -> None:
    """Log at info level, on rank 0. Arguments as of `logging.Logger.info`."""
    log.info(message, *args, **_at_caller(kwargs))


@rank_zero_only
def rank_zero_warn(
    message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 1, **kwargs: Any
) -> None:
    """Warn, on rank 0.

    The warning carries the place of the call, so Python's own filter shows it once per message and place.

    Args:
        message: the text, or a warning object.
        category: class of the warning.
        stacklevel: as of `warnings.warn`: 1 is the line that calls this function, 2 its caller.
    """
    # two frames lie between warnings.warn and the line that called: this function and its decorator
    warnings.warn(message, category, stacklevel=stacklevel + 2, **kwargs)


@rank_zero_only
def rank_zero_deprecation(message: str | Warning, stacklevel: int = 1, **kwargs: Any) -> None:
    """Warn of something deprecated, on rank 0. Arguments as of `rank_zero_warn`."""
    warnings.warn(message, kwargs.pop("category", DeprecationWarning), stacklevel=stacklevel + 2, **kwargs)


def warn_once(message: str, *, key: str | None = None, category: type[Warning] = UserWarning) -> None:
    """Warn, on rank 0, once in this process.

    Args:
        message: the text.
        key: what makes two warnings the same one; the message itself if None.
        category: class of the warning.
    """
    if (key or message) not in _warned:
        _warned.add(key or message)
        rank_zero_warn(message, category, stacklevel=2)


_warned: set[str] = set()


def forget_warnings() -> None:
    """Let :func:`warn_once` say everything again: a process in which tests run has many first times."""
    _warned.clear()


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """``"[rank: 3] message"``; the message alone where the rank is not known."""
    return message if rank is None else f"[rank: {rank}] {message}"


def _at_caller(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Logging arguments that name the line that called a ``rank_zero_*`` function as the record's place."""
    return {**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 2}


# -- what a rank does -----------------------------------------------------------------------------------------


F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Doing:
    """A mark on a function."""

    words: str  #: "saving a checkpoint"; "": none
    waits: bool  #: whether the function itself waits for other ranks


def does(words: str) -> Callable[[F], F]:
    """Mark a function: who is in it, or in what it calls, does this."""
    return lambda function: function


def waits(words: str = "") -> Callable[[F], F]:
    """Mark a function that waits for other ranks, and maybe say what for."""
    return lambda function: function


@functools.cache
def marks_in(file: str) -> dict[str, Doing]:
    """The marks in a file of lockstep's, by the names of functions; nothing where there is no source."""
    try:
        with open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    found = {}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id in ("does", "waits"):
                words = ast.literal_eval(mark.args[0]) if mark.args else ""
                found[function.name] = Doing(words, mark.func.id == "waits")
    return found
