"""Reports from this process to its supervisor: its Trainer calls, its exceptions, and other notes."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from lockstep.cluster.torchelastic import CAUSE, hand_cause
from lockstep.ground.errors import RankFailed
from lockstep.ground.installed import EXCEPTHOOK, EXIT_SUPERVISOR
from lockstep.launch.parent_death import PROCESS
from lockstep.supervise import stack_request
from lockstep.supervise.causes import Cause, cause_of
from lockstep.supervise.mailbox import JOINED, MAILBOX, RANK, Mailbox, leave_note
from lockstep.supervise.screen_text import MOST, MOST_ALONE, WHOLE, one_line, reason_of, shortened, wipe_line, wiping
from lockstep.supervise.signals import accept_ctrl_c, by_default
from lockstep.supervise.snapshot import RankPosition
from lockstep.supervise.stack import current_stack, is_through_lockstep
from lockstep.supervise.trace_memory import offer as offer_trace

CAUSE_TIMEOUT = 1.0
"""Seconds that a rank with a lost connection waits for the first cause."""

at_exit: list[Callable[[], None]] = []
"""Exit functions of this process' connection to the supervisor. The list has one entry or none."""


def _run_at_exit() -> None:
    for leave in at_exit:
        leave()


# Registered when the Trainer is imported, and so run after the exit functions of the script: for a rank 0 whose run has
# failed, this one does not return. The client is imported too late for that.
EXIT_SUPERVISOR.at_exit(_run_at_exit)


class _Rank:
    """State of this process as a rank: rank, mailbox, current call, and the exception that was last reported."""

    def __init__(self) -> None:
        self.rank = 0
        self.address = ""
        self.call = 0
        self.before = 0  # earlier calls that were made without ranks
        self.called = ""
        self.location = ""  # line of the current call; "" outside of calls
        self.raised: tuple[BaseException, Cause] | None = None
        self.limits: dict[str, Any] = {}
        self.hands = False  # an agent needs the error that ends the script, and no supervisor reports it


_rank = _Rank()


@contextmanager
def record_call(rank: int, address: str, called: str = "", launched: bool = False) -> Iterator[None]:
    """Report a Trainer call to the supervisor: its start, its end, and the exception that ended it.

    The call runs inside the context.

    Args:
        rank: global rank of this process.
        address: address of the supervisor's mailbox; "" without one.
        called: the line of the user's code that called from another process.
        launched: whether an address may be found later (:func:`report_to`).
    """
    _rank.rank, _rank.address = rank, address
    _rank.call, _rank.raised = _rank.call + 1, None
    location = _rank.called = called or current_stack().location()
    _rank.location = location
    if address or launched:
        accept_ctrl_c()
        watch_uncaught()
        _note_position(location, inside=True)
    try:
        yield
    except BaseException as error:
        record_failure(error)
        watch_uncaught()
        reason = name_first_cause(error)
        if reason is not error:
            raise reason from error
        raise
    finally:
        _rank.location = ""
        _note_position(location, inside=False)


def count_call_without_ranks() -> None:
    """Count a Trainer call that this process runs alone or in temporary processes, before ranks are started."""
    _rank.before += 1


def calls_before() -> int:
    """Return the number of calls that `count_call_without_ranks` has counted so far."""
    return _rank.before


def record_failure(error: BaseException, rank: int | None = None, address: str = "") -> None:
    """Report to the supervisor an exception that ends a Trainer call. A repeated report has no effect.

    Args:
        error: the exception.
        rank: outside a call, the global rank of this process.
        address: outside a call, the address of the mailbox.
    """
    if rank is not None:
        _rank.rank, _rank.address = rank, address
    if _rank.address and (_rank.raised is None or _rank.raised[0] is not error):
        _rank.raised = (error, cause_of(_rank.rank, error, _rank.call, _rank.called))
        leave_note(_rank.address, _rank.raised[1])


def record_ctrl_c_report() -> None:
    """Report that this rank has printed its message about Ctrl-C. Safe in signal handlers, since it takes no lock."""
    if _rank.address:
        leave_note(_rank.address, {"heard": _rank.rank, "call": _rank.call})


def record_join() -> None:
    """Report that this rank has joined the process group.

    From then on, Ctrl-C ends the ranks in an orderly way.
    """
    if _rank.address:
        leave_note(_rank.address, {JOINED: _rank.rank})


def report_to(address: str) -> None:
    """Write all further reports to a mailbox. The first report describes the current Trainer call."""
    _rank.address = address
    if _rank.location:
        _note_position(_rank.location, inside=True)


def watch_early_errors(environ: Mapping[str, str] = os.environ) -> None:
    """In a process that lockstep started as a rank, report errors that end the script before its first call."""
    if RANK in environ and MAILBOX in environ and not _rank.address:
        _rank.rank, _rank.address = int(environ[RANK]), environ[MAILBOX]
        watch_uncaught()


def pass_early_errors(environ: Mapping[str, str] = os.environ) -> None:
    """Report errors that end the script to the agent of `lockstep run`, until there is a supervisor.

    Without such an agent, do nothing.
    """
    if environ.get(CAUSE) and environ.get("RANK", "").isdigit() and environ.get(PROCESS) == str(os.getpid()):
        _rank.rank, _rank.hands = int(environ["RANK"]), True
        # this hook replaces that of launch/site
        sys.excepthook = getattr(sys.excepthook, "before_lockstep", sys.excepthook)
        watch_uncaught()


def name_first_cause(error: BaseException) -> BaseException:
    """Replace an error from a lost connection with a `RankFailed` that names the cause of the run's failure.

    Return any other error unchanged. This may wait up to a second for the first cause. If the cause is still unknown
    then, the error is returned unchanged as well.
    """
    if not _rank.address or not isinstance(error, RuntimeError) or isinstance(error, RankFailed):
        return error
    note = record_for(error, _rank.rank)
    if not note.lost:
        return error
    notes, start, first = Mailbox.at(_rank.address), time.monotonic(), None
    while notes is not None and first is None and time.monotonic() - start < CAUSE_TIMEOUT:
        decided = [each for each in notes.others("first") if each["rank"] != _rank.rank]
        own = [cause for cause in notes.read() if not cause.lost and cause.rank != _rank.rank]
        if decided:
            first = int(decided[0]["rank"]), str(decided[0]["first"])
        elif own and own[0].call == _rank.call and time.monotonic() - start > CAUSE_TIMEOUT / 4:
            # the supervisor should have decided by now: it may be gone
            first = own[0].rank, str(own[0])
        else:
            time.sleep(0.02)
    if first is None:
        return error
    reason = RankFailed(
        f"{first[1]} (this is rank {_rank.rank}, which lost its connection in {note.doing}, {note.location})",
        first[0],
    )
    _rank.raised = (reason, note)
    return reason


def is_ending() -> bool:
    """Return True if the run is about to end, because the ranks have diverged or a node is gone."""
    return any(first["rank"] < 0 for first in _known_firsts())


def _known_firsts() -> list[dict[str, Any]]:
    """Return the supervisor's notes on why the run fails; empty until the cause is certain."""
    notes = Mailbox.at(_rank.address) if _rank.address else None
    return [] if notes is None else notes.others("first")


def record_for(error: BaseException, rank: int) -> Cause:
    """Return the record of an exception: the one that was reported, or a new one."""
    if _rank.raised is not None and _rank.raised[0] is error:
        return _rank.raised[1]
    return cause_of(rank, error)


def record_wait_limits(hang_timeout: float | None, hang_kill: float | None) -> None:
    """Report to the supervisor how long this rank may wait for other ranks.

    Args:
        hang_timeout: seconds until the wait is reported; None: no limit.
        hang_kill: seconds until the run is ended; None: no limit.
    """
    _rank.limits = {"hang_timeout": hang_timeout, "hang_kill": hang_kill}
    _note_position(_rank.called, inside=True)


def _note_position(location: str, inside: bool) -> None:
    if _rank.address:
        answers, collectives = stack_request.offer(), offer_trace()
        position = RankPosition(_rank.rank, time.monotonic(), _rank.call, inside, location, os.getpid(), answers)
        leave_note(_rank.address, replace(position, collectives=collectives, **_rank.limits))


def watch_uncaught() -> None:
    """From now on, report uncaught exceptions, even outside of Trainer calls, and print them in at most 40 lines.

    One rank on each node prints its traceback. The errors of other ranks are in their notes, and reported with the
    first cause. A rank that has only lost a connection prints one line, or nothing if the first cause is known, because
    the first cause has to be the last line on the terminal. On a single process, a traceback is shortened if it
    contains lockstep.
    """
    # the script may have set a hook of its own since
    if not isinstance(sys.excepthook, _Hook):
        EXCEPTHOOK.remove()
        hook = _Hook(sys.excepthook)

        def undo() -> None:
            hook.is_removed = True
            if sys.excepthook is hook:
                sys.excepthook = hook.before

        def install() -> Callable[[], object]:
            sys.excepthook = hook
            return undo

        EXCEPTHOOK.install(install)


class _Hook:
    """Hook for ``sys.excepthook`` that reports and prints uncaught exceptions in a rank.

    Args:
        before: the previous hook.

    Attributes:
        is_removed: whether this hook only calls the previous one. A later hook, such as torch's, may still refer to it.
    """

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before
        self.is_removed = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.is_removed:
            self.before(kind, error, trace)
            return
        # after a loader worker has crashed, its SIGCHLD handler raises for each further worker that ends, here too
        for last in (False, True):
            try:
                with by_default(signal.SIGCHLD):
                    self._report(kind, error, trace)
                return
            except RuntimeError:
                if last:
                    raise

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record_failure(error)
        if not _rank.address:
            if _rank.hands and not isinstance(error, KeyboardInterrupt):
                hand_cause(str(cause_of(_rank.rank, error)))
            if is_through_lockstep(error):
                self._print(kind, error, trace, MOST_ALONE)
            else:
                self.before(kind, error, trace)
            return
        note = record_for(error, _rank.rank)
        if note.lost:
            if _known_firsts() or isinstance(error, RankFailed) or not _is_first_to("loses"):
                return
            wipe_line()
            text = f"rank {note.rank} lost the connection to other ranks in {note.doing} ({note.location})"
            print(f"lockstep: {one_line(text, None)}", file=sys.stderr, flush=True)
        elif isinstance(error, KeyboardInterrupt):
            if not _rank.rank:  # one rank's traceback is enough
                _drop_lost(error)
                self.before(kind, error, trace)
        elif _is_first_to("prints") or os.environ.get(WHOLE) == "1":
            self._print(kind, error, trace, MOST)
            leave_note(_rank.address, {"printed": _rank.rank})
        else:
            leave_note(_rank.address, {"folded": _rank.rank})

    def _print(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, most: int) -> None:
        failure = ""
        # torch's own hook, which prefixes each line with the rank once a group exists, is left out
        innermost: Callable[..., object] | None = self.before
        while innermost is not None:
            if isinstance(innermost, _Hook) and innermost.is_removed:
                innermost = innermost.before
            elif getattr(innermost, "__name__", "") == "_distributed_excepthook":
                innermost = inspect.getclosurevars(innermost).nonlocals.get("old_hook")
            else:
                break
        if innermost is not sys.__excepthook__:
            try:
                if _rank.rank:
                    wipe_line()
                self.before(kind, error, trace)
                return
            except Exception as own:  # Python would print both in full
                failure = f"lockstep: sys.excepthook itself has failed: {reason_of(own)}\n"
        bar = wiping() if _rank.rank else ""  # rank 0 has closed its own bars
        print(bar + failure + shortened(error, most), end="", file=sys.stderr, flush=True)


def _drop_lost(error: BaseException) -> None:
    """Remove errors about lost connections from the context of a KeyboardInterrupt, because they add no information.

    All ranks were interrupted, so lost connections are expected.
    """
    each: BaseException | None = error
    while each is not None:
        if each.__context__ is not None and cause_of(_rank.rank, each.__context__).lost:
            each.__context__ = None
        each = each.__context__


def _is_first_to(what: str) -> bool:
    """Return True if this is the first rank of its node to request the action ``what``, and so has to perform it.

    An example is printing an error that several ranks have in common.
    """
    notes = Mailbox.at(_rank.address)
    if notes is None:
        return True
    if not any(note[what] == _rank.rank for note in notes.others(what)):
        notes.leave({what: _rank.rank})
    reports = notes.others(what)
    return not reports or bool(reports[0][what] == _rank.rank)
