"""Functions that call, log and warn on rank 0 only, and decorators that describe what a rank is doing.

The supervisor of a node reports what a rank does from the rank's stack. It sees files, lines and function names of code
that it has not imported, so it reads the marks from the source.
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
"""Names of Lightning's loggers, which scripts written for Lightning silence."""


class _Screen(logging.Handler):
    """Log handler that prints to stderr, unless logging is configured or Lightning's loggers have a higher level."""

    def emit(self, record: logging.LogRecord) -> None:
        # INFO is the level that Lightning gives its own loggers on import.
        shown = max(record.levelno, logging.INFO)
        if not logging.root.handlers and all(shown >= logging.getLogger(name).level for name in LIGHTNINGS):
            try:
                print(self.format(record), file=sys.stderr, flush=True)
            except Exception:  # the terminal is closed or the disk is full: a message must not end the run
                self.handleError(record)


log = logging.getLogger("lockstep")
if not log.handlers:
    log.addHandler(_Screen())
if log.level == logging.NOTSET:  # else the user has set it before this import
    log.setLevel(logging.INFO)


class _RankZeroOnly:
    """Class of the decorator `rank_zero_only`, which also stores this process's global rank."""

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
"""Decorator that runs a function on global rank 0 only. On other ranks the call returns ``default``.

`rank_zero_only.rank` is the global rank of this process, which is 0 until the launch sets it. It is read at each call,
so a function may be decorated before or after the launch.

Example::

    @rank_zero_only
    def announce(text): print(text)

    @rank_zero_only(default=0)
    def files_written(): ...
"""


@rank_zero_only
def rank_zero_debug(message: object, *args: object, **kwargs: Any) -> None:
    """Log at debug level on rank 0 only. The arguments are those of `logging.Logger.debug`."""
    log.debug(message, *args, **_at_caller(kwargs))


@rank_zero_only
def rank_zero_info(message: object, *args: object, **kwargs: Any) -> None:
    """Log at info level on rank 0 only. The arguments are those of `logging.Logger.info`.

    Example::

        rank_zero_info("%d samples in %s", len(dataset), folder)
    """
    log.info(message, *args, **_at_caller(kwargs))


@rank_zero_only
def rank_zero_warn(
    message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 1, **kwargs: Any
) -> None:
    """Issue a warning on rank 0 only.

    The warning refers to the line of the call, so Python's own filter shows it once per message and line.

    Args:
        message: the text, or a warning object.
        category: class of the warning.
        stacklevel: as in `warnings.warn`: 1 is the line that calls this function, 2 its caller.
    """
    # two frames are between warnings.warn and the calling line: this function and its decorator
    warnings.warn(message, category, stacklevel=stacklevel + 2, **kwargs)


@rank_zero_only
def rank_zero_deprecation(message: str | Warning, stacklevel: int = 1, **kwargs: Any) -> None:
    """Issue a `DeprecationWarning` on rank 0 only. The arguments are those of `rank_zero_warn`."""
    warnings.warn(message, kwargs.pop("category", DeprecationWarning), stacklevel=stacklevel + 2, **kwargs)


def warn_once(message: str, *, key: str | None = None, category: type[Warning] = UserWarning) -> None:
    """Issue a warning on rank 0, at most once in this process.

    Args:
        message: the text.
        key: identifies the warning; the message itself if None.
        category: class of the warning.
    """
    if (key or message) not in _warned:
        _warned.add(key or message)
        rank_zero_warn(message, category, stacklevel=2)


_warned: set[str] = set()


def forget_warnings() -> None:
    """Let :func:`warn_once` show every warning again, for a process that runs several tests."""
    _warned.clear()


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return ``"[rank: 3] message"``, or the message alone if the rank is None."""
    return message if rank is None else f"[rank: {rank}] {message}"


def _at_caller(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for a logging call, so that its record names the caller of a ``rank_zero_*`` function."""
    return {**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 2}


# -- what a rank does -----------------------------------------------------------------------------------------


F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Doing:
    """Description of what a function does, from the decorator `does` or `waits` on the function."""

    words: str  #: "saving a checkpoint"; "" if there are none
    waits: bool  #: True if the function itself waits for other ranks


def does(words: str) -> Callable[[F], F]:
    """Mark a function with a description of what a rank does while it runs, such as "saving"."""
    return lambda function: function


def waits(words: str = "") -> Callable[[F], F]:
    """Mark a function that waits for other ranks. ``words`` may describe what the rank does, as in `does`."""
    return lambda function: function


@functools.cache
def marks_in(file: str) -> dict[str, Doing]:
    """Return the `does` and `waits` marks in a source file, by function name; {} if the file cannot be read."""
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
