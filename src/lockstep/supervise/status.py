"""Where a rank stands: what it notes of itself, and what it leaves for the process that watches it."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import IO, Any

from lockstep.cluster.torchelastic import CAUSE, hand_cause
from lockstep.ground.errors import RankFailed
from lockstep.ground.installed import EXCEPTHOOK
from lockstep.launch.parent_death import PROCESS
from lockstep.supervise import stack
from lockstep.supervise.causes import Cause, Stand, cause_of
from lockstep.supervise.signals import by_default, hear
from lockstep.supervise.stack import (
    MOST,
    MOST_ALONE,
    WHOLE,
    calling,
    is_through_lockstep,
    one_line,
    reason_of,
    shortened,
    wipe_line,
    wiping,
)
from lockstep.supervise.trace_memory import offer as offer_trace

# -- the mailbox ---------------------------------------------------------------------------------------------


MAILBOX = "LOCKSTEP_MAILBOX"
"""The variable with the address of the mailbox into which a rank puts notes."""

RANK = "LOCKSTEP_RANK"
"""The variable with the rank of a started process among all, for what it notes before its Trainer."""


class Mailbox:
    """What the ranks of a node put in for their supervisor: a file without a name, which leaves nothing.

    Args:
        descriptor: of the file, where another process has made it; None: make it.

    Attributes:
        descriptor: of the file; a started process inherits it and writes to it.
        address: the same for an environment variable; a process that got only the variable can tell.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._file: IO[bytes] | None = None
        if descriptor is None:
            self._file = _file_without_a_name()
            descriptor = self._file.fileno()
        self.descriptor = descriptor
        self.address = f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"
        self._lock = threading.Lock()
        self._closed = False
        self._read = 0
        self._causes: dict[int, Cause] = {}
        self._stands: dict[int, Stand] = {}
        self._others: list[dict[str, Any]] = []

    @classmethod
    def at(cls, address: str) -> Mailbox | None:
        """The mailbox at an address; None if this process cannot read there."""
        descriptor, inode = map(int, address.split(":"))
        try:
            return cls(descriptor) if os.fstat(descriptor).st_ino == inode else None
        except OSError:
            return None

    def read(self) -> list[Cause]:
        """The exceptions so far, the earliest first; of each rank the last."""
        with self._lock:
            self._take_in()
            return sorted(self._causes.values(), key=lambda cause: cause.at)

    def stands(self) -> dict[int, Stand]:
        """Where each rank stands that has come to a call, by rank."""
        with self._lock:
            self._take_in()
            return dict(self._stands)

    def others(self, key: str) -> list[dict[str, Any]]:
        """Other notes that have such a key, in the order in which they were left."""
        with self._lock:
            self._take_in()
            return [note for note in self._others if key in note]

    def leave(self, note: Cause | Stand | dict[str, Any]) -> None:
        """Leave one."""
        leave_note(self.address, note)

    def is_inside(self, rank: int) -> bool:
        """Whether a rank has gone into a call and not come out of it."""
        stand = self.stands().get(rank)
        return stand is not None and stand.inside

    def is_someone_ending(self) -> bool:
        """Whether a rank has failed and is not out of its call yet: it may be saving what it has."""
        with self._lock:
            self._take_in()
            stands = self._stands
            return any(
                rank in stands and stands[rank].inside and stands[rank].call == cause.call
                for rank, cause in self._causes.items()
            )

    def failed_at(self, rank: int) -> float | None:
        """When a rank left a note on an exception; None if it has not."""
        return next((cause.at for cause in self.read() if cause.rank == rank), None)

    def close(self) -> None:
        """Let go of the file; what was in it can still be read."""
        with self._lock:
            self._take_in()
            self._closed = True
            if self._file is not None:
                self._file.close()

    def _take_in(self) -> None:
        size = 0 if self._closed else os.fstat(self.descriptor).st_size
        if size <= self._read:
            return
        text = os.pread(self.descriptor, size - self._read, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.split(b"\n"):
            with suppress(ValueError, TypeError, RecursionError):  # half a note, where a disk was full: it is left out
                note = json.loads(line)
                if "reason" in note:
                    self._causes[note["rank"]] = Cause(**note)
                elif "inside" in note:
                    self._stands[note["rank"]] = Stand(**note)
                else:
                    self._others.append(note)
        self._read += len(whole)


def _file_without_a_name() -> IO[bytes]:
    """In memory where the system can do that: on a disk that is full, nobody could leave a note on it.

    Each note goes to the end: processes share the file's position, which Linux does not guard for a file in memory, so
    that two that write at once would write to one place.
    """
    if not hasattr(os, "memfd_create"):
        return tempfile.TemporaryFile(prefix="lockstep-")
    descriptor = os.memfd_create("lockstep-mailbox")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return open(descriptor, "w+b", buffering=0)


def leave_note(address: str, note: Cause | Stand | dict[str, Any]) -> None:
    """Write a note to the process that watches this one; nowhere if that did not hand its file down."""
    descriptor, inode = map(int, address.split(":"))
    try:
        if os.fstat(descriptor).st_ino == inode:
            os.write(descriptor, json.dumps(note if isinstance(note, dict) else asdict(note)).encode() + b"\n")
    except OSError:  # closed, or its disk is full: the exception itself matters more
        return


# -- status of this rank -------------------------------------------------------------------------------------


PATIENCE = 1.0
"""Seconds that a rank which has lost another waits to be told why."""


class _Rank:
    """This process as a rank: which one, whom it reports to, what it has reported."""

    def __init__(self) -> None:
        self.rank = 0
        self.address = ""
        self.call = 0
        self.called = ""
        self.location = ""  # of the call, while it is in it
        self.raised: tuple[BaseException, Cause] | None = None
        self.limits: dict[str, Any] = {}
        self.hands = False  # an agent wants to know what ends the script, and no supervisor tells it


_rank = _Rank()


@contextmanager
def noted_call(rank: int, address: str, called: str = "", launched: bool = False) -> Iterator[None]:
    """One call, from its first line to its last: where this rank stands, and what ended it, is noted.

    Args:
        rank: this process' global rank.
        address: of the mailbox of the process that started the ranks; "" where that was somebody else.
        called: the line of the user's code that called from another process.
        launched: whether an address may be found later (:func:`report_to`).
    """
    _rank.rank, _rank.address = rank, address
    _rank.call, _rank.raised = _rank.call + 1, None
    location = _rank.called = called or calling().location()
    _rank.location = location
    if address or launched:
        hear()
        watch_uncaught()
        _stand(location, inside=True)
    try:
        yield
    except BaseException as error:
        failed(error)
        watch_uncaught()
        reason = named(error)
        if reason is not error:
            raise reason from error
        raise
    finally:
        _rank.location = ""
        _stand(location, inside=False)


def failed(error: BaseException, rank: int | None = None, address: str = "") -> None:
    """Note an exception that ends the call, as soon as it is known that it does; the first word on it counts.

    Args:
        error: what was raised.
        rank: outside a call: this process' global rank.
        address: outside a call: of the mailbox.
    """
    if rank is not None:
        _rank.rank, _rank.address = rank, address
    if _rank.address and (_rank.raised is None or _rank.raised[0] is not error):
        _rank.raised = (error, cause_of(_rank.rank, error, _rank.call, _rank.called))
        leave_note(_rank.address, _rank.raised[1])


def heard_ctrl_c() -> None:
    """Note that this rank has said what follows from a Ctrl-C. It may be called in a handler: it takes no lock."""
    if _rank.address:
        leave_note(_rank.address, {"heard": _rank.rank, "call": _rank.call})


def report_to(address: str) -> None:
    """Leave notes here from now on: the supervisor has been found, maybe while this rank was in a call."""
    _rank.address = address
    if _rank.location:
        _stand(_rank.location, inside=True)


def note_early(environ: Mapping[str, str] = os.environ) -> None:
    """In a rank that lockstep has started: note what ends the script before its first call."""
    if RANK in environ and MAILBOX in environ and not _rank.address:
        _rank.rank, _rank.address = int(environ[RANK]), environ[MAILBOX]
        watch_uncaught()


def hand_early(environ: Mapping[str, str] = os.environ) -> None:
    """In a rank of `lockstep run`: hand its agent what ends the script before a supervisor is there to tell."""
    if environ.get(CAUSE) and environ.get("RANK", "").isdigit() and environ.get(PROCESS) == str(os.getpid()):
        _rank.rank, _rank.hands = int(environ["RANK"]), True
        watch_uncaught()


def named(error: BaseException) -> BaseException:
    """The error itself; or, where a collective raised it since another rank is gone, one that says what ended that.

    It waits for up to a second until that is known.
    """
    if not _rank.address or not isinstance(error, RuntimeError) or isinstance(error, RankFailed):
        return error
    note = note_on(error, _rank.rank)
    first = _first_of_others() if note.lost else None
    if first is None:
        return error
    reason = RankFailed(
        f"{first[1]} (this is rank {_rank.rank}, which lost it in {note.doing}, {note.location})", first[0]
    )
    _rank.raised = (reason, note)
    return reason


def _first_of_others() -> tuple[int, str] | None:
    """Rank and words of the first cause, where another rank is it; None if nobody knows within a second."""
    notes, began = Mailbox.at(_rank.address), time.monotonic()
    while notes is not None and time.monotonic() - began < PATIENCE:
        for first in notes.others("first"):
            if first["rank"] != _rank.rank:
                return int(first["rank"]), str(first["first"])
        own = [cause for cause in notes.read() if not cause.lost and cause.rank != _rank.rank]
        if own and own[0].call == _rank.call and time.monotonic() - began > PATIENCE / 4:
            return own[0].rank, str(own[0])
        time.sleep(0.02)
    return None


def is_given_up() -> bool:
    """Whether the run is being ended since its ranks went different ways, or a node has gone: no boundary will come."""
    return any(first["rank"] < 0 for first in _known_firsts())


def _known_firsts() -> list[dict[str, Any]]:
    """What is noted of the first cause; nothing as long as it is not certain."""
    notes = Mailbox.at(_rank.address) if _rank.address else None
    return [] if notes is None else notes.others("first")


def note_on(error: BaseException, rank: int) -> Cause:
    """The note that was left on an exception, or a new one where none was."""
    if _rank.raised is not None and _rank.raised[0] is error:
        return _rank.raised[1]
    return cause_of(rank, error)


def expect(hang_timeout: float | None, hang_kill: float | None) -> None:
    """Note how long this rank may wait for others: until it is told who waits for whom, and until the run is ended.

    Args:
        hang_timeout, hang_kill: seconds; None: for ever.
    """
    _rank.limits = {"hang_timeout": hang_timeout, "hang_kill": hang_kill}
    _stand(_rank.called, inside=True)


def _stand(location: str, inside: bool) -> None:
    if _rank.address:
        answers, collectives = stack.offer(), offer_trace()
        stand = Stand(_rank.rank, time.monotonic(), _rank.call, inside, location, os.getpid(), answers)
        leave_note(_rank.address, replace(stand, collectives=collectives, **_rank.limits))


def watch_uncaught() -> None:
    """From here on, what nobody catches is noted, also outside a call, and printed in at most 40 lines.

    One rank of a node prints its traceback; what the others failed of is in their notes, for the one who tells the
    first cause. A rank that has only lost another prints one line, and nothing where the first cause is known: that
    may be on the screen already, and is to be the last. On one process a traceback is folded, if lockstep is in it.
    """
    if not isinstance(sys.excepthook, _Hook):  # nobody's, or one that the script has set since
        EXCEPTHOOK.remove()
        EXCEPTHOOK.install(_put_hook)


def _put_hook() -> Callable[[], object]:
    sys.excepthook = hook = _Hook(sys.excepthook)

    def undo() -> None:
        hook.is_removed = True
        if sys.excepthook is hook:
            sys.excepthook = hook.before

    return undo


class _Hook:
    """Python's hook for what nobody catches, in a rank.

    Args:
        before: the hook that was there.

    Attributes:
        is_removed: it only hands on. Another hook, torch's for one, may still have it as the one before.
    """

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before
        self.is_removed = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.is_removed:
            self.before(kind, error, trace)
            return
        # where a loader's worker has crashed, its handler of SIGCHLD raises for each further worker that ends, here too
        for last in (False, True):
            try:
                with by_default(signal.SIGCHLD):
                    self._tell(kind, error, trace)
                return
            except RuntimeError:
                if last:
                    raise

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed(error)
        if not _rank.address:
            if _rank.hands and not isinstance(error, KeyboardInterrupt):
                hand_cause(str(cause_of(_rank.rank, error)))
            if is_through_lockstep(error):
                self._print(kind, error, trace, MOST_ALONE)
            else:
                self.before(kind, error, trace)
            return
        note = note_on(error, _rank.rank)
        if note.lost:
            if _known_firsts() or isinstance(error, RankFailed) or not _is_first_to("loses"):
                return
            wipe_line()
            text = f"rank {note.rank} lost the others in {note.doing} ({note.location})"
            print(f"lockstep: {one_line(text, None)}", file=sys.stderr, flush=True)
        elif isinstance(error, KeyboardInterrupt):
            if not _rank.rank:  # one rank's is enough
                _leave_out_lost(error)
                self.before(kind, error, trace)
        elif _is_first_to("prints") or os.environ.get(WHOLE) == "1":
            self._print(kind, error, trace, MOST)
            leave_note(_rank.address, {"printed": _rank.rank})
        else:
            leave_note(_rank.address, {"folded": _rank.rank})

    def _print(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, most: int) -> None:
        failure = ""
        if _without_torchs(self.before) is not sys.__excepthook__:
            try:
                if _rank.rank:
                    wipe_line()
                self.before(kind, error, trace)
                return
            except Exception as own:  # Python would print both, whole
                failure = f"lockstep: sys.excepthook itself has failed: {reason_of(own)}\n"
        bar = wiping() if _rank.rank else ""  # rank 0 has closed its own
        print(bar + failure + shortened(error, most), end="", file=sys.stderr, flush=True)


def _without_torchs(hook: Callable[..., object]) -> Callable[..., object]:
    """The hook around which torch has put its own, which names the rank before each line, when a group was made."""
    while True:
        if isinstance(hook, _Hook) and hook.is_removed:
            hook = hook.before
        elif getattr(hook, "__name__", "") == "_distributed_excepthook":
            inner = inspect.getclosurevars(hook).nonlocals.get("old_hook")
            if inner is None:
                return hook
            hook = inner
        else:
            return hook


def _leave_out_lost(error: BaseException) -> None:
    """Forget that this rank had just lost others when it was interrupted: they were, too, and a moment earlier."""
    each: BaseException | None = error
    while each is not None:
        if each.__context__ is not None and cause_of(_rank.rank, each.__context__).lost:
            each.__context__ = None
        each = each.__context__


def _is_first_to(what: str) -> bool:
    """Whether this is the first rank of its node to announce something: what one does, the others need not."""
    notes = Mailbox.at(_rank.address)
    if notes is None:
        return True
    if not any(note[what] == _rank.rank for note in notes.others(what)):
        notes.leave({what: _rank.rank})
    said = notes.others(what)
    return not said or bool(said[0][what] == _rank.rank)
