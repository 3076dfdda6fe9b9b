"""What the callbacks of a communication hook's futures raise: torch prints it and goes on, or never ends the future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch

WAIT = 5e-5
"""Seconds between two looks at a future that a failed callback may have left open."""

Callback = Callable[[Any], Any]


class CallbackErrors:
    """Hears what the callbacks raise that a hook gives to futures, and their callbacks in turn.

    An error in ``future.then(...)`` is the error of the future that ``then`` gave; one in
    ``future.add_done_callback(...)`` is printed by torch, and nobody is told. A future that such a callback was to
    complete never ends.

    Attributes:
        error: the first one.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._may_stay_open = False
        _listen()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, callbacks that this thread registers are listened to."""
        before, _current.errors = getattr(_current, "errors", None), self
        try:
            yield
        finally:
            _current.errors = before

    def wait(self, future: Any) -> Any:
        """The value of ``future``, or the error of a callback, as it was raised there."""
        if self._may_stay_open:
            while self.error is None and not future.done():
                time.sleep(WAIT)
        self.raise_error()
        try:
            return future.wait()
        except Exception:
            self.raise_error()  # which torch has told in words of its own
            raise

    def raise_error(self) -> None:
        """Raise what a callback has raised, if one has."""
        if self.error is not None:
            raise self.error

    def guard(self, callback: Callback, is_done_callback: bool) -> Callback:
        """``callback``, which is listened to when it runs, in whichever thread."""
        self._may_stay_open = self._may_stay_open or is_done_callback

        @wraps(callback)
        def guarded(future: Any) -> Any:
            with self.heard():
                try:
                    return callback(future)
                except BaseException as error:
                    self.error = self.error or error
                    raise

        return guarded


_current = threading.local()


@cache
def _listen() -> None:
    """Have torch's futures ask, from now on, whether somebody listens to the callbacks of this thread."""
    kind: Any = torch._C.Future
    for name in ("then", "add_done_callback"):
        setattr(kind, name, _asking(getattr(kind, name), name == "add_done_callback"))


def _asking(own: Callable[..., Any], is_done_callback: bool) -> Callable[..., Any]:
    @wraps(own)
    def register(future: Any, callback: Callback) -> Any:
        errors: CallbackErrors | None = getattr(_current, "errors", None)
        return own(future, callback if errors is None else errors.guard(callback, is_done_callback))

    return register
