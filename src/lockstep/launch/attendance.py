"""A rank's attendance: it notes when it goes into a call, when it comes out, and what ended it there."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from lockstep.launch import sample
from lockstep.launch.causes import Cause, Stand, cause_of
from lockstep.launch.interrupt import hear
from lockstep.launch.notes import leave_note
from lockstep.launch.stack import calling


class _Rank:
    """This process as a rank: which one, whom it reports to, what it has reported."""

    def __init__(self) -> None:
        self.rank = 0
        self.address = ""
        self.call = 0
        self.called = ""
        self.raised: tuple[BaseException, Cause] | None = None


_rank = _Rank()


@contextmanager
def attended(rank: int, address: str, called: str = "") -> Iterator[None]:
    """One call, from its first line to its last: where this rank stands, and what ended it, is noted.

    Args:
        rank: this process' global rank.
        address: of the notes of the process that started the ranks; "" where that was somebody else.
        called: the line of the user's code that called from another process.
    """
    _rank.rank, _rank.address = rank, address
    _rank.call, _rank.raised = _rank.call + 1, None
    place = _rank.called = called or calling().place()
    if address:
        hear()
        _note_what_nobody_catches()
        _stand(place, inside=True, answers=sample.offer())
    try:
        yield
    except BaseException as error:
        failed(error)
        raise
    finally:
        _stand(place, inside=False)


def failed(error: BaseException, rank: int | None = None, address: str = "") -> None:
    """Note an exception that ends the call, as soon as it is known that it does; the first word on it counts.

    Args:
        error: what was raised.
        rank: outside a call: this process' global rank.
        address: outside a call: of the notes.
    """
    if rank is not None:
        _rank.rank, _rank.address = rank, address
    if _rank.address and (_rank.raised is None or _rank.raised[0] is not error):
        _rank.raised = (error, cause_of(_rank.rank, error, _rank.call, _rank.called))
        leave_note(_rank.address, _rank.raised[1])


def note_on(error: BaseException, rank: int) -> Cause:
    """The note that was left on an exception, or a new one where none was."""
    if _rank.raised is not None and _rank.raised[0] is error:
        return _rank.raised[1]
    return cause_of(rank, error)


def _stand(place: str, inside: bool, answers: str = "") -> None:
    if _rank.address:
        stand = Stand(_rank.rank, time.monotonic(), _rank.call, inside, place, os.getpid(), answers)
        leave_note(_rank.address, stand)


@functools.cache
def _note_what_nobody_catches() -> None:
    """Note what ends the script outside a call, too; and print one line in place of a traceback that only says that
    another rank has gone: its note has it whole, for the one who tells the first cause."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        failed(error)
        note = note_on(error, _rank.rank)
        if note.lost:
            text = f"lockstep: rank {note.rank} lost the others in {note.doing} ({note.place})"
            print(text, file=sys.stderr, flush=True)
        elif not (isinstance(error, KeyboardInterrupt) and _rank.rank):  # one rank's is enough
            before(kind, error, trace)

    sys.excepthook = hook
