"""Pure functions that find a run's first failure in the records of all ranks, and word the message about it."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.ground.errors import RankFailed
from lockstep.launch.processes import Ended
from lockstep.supervise.hang_text import different_places, group_ranks, has_left_call, rank_list
from lockstep.supervise.screen_text import one_line, reason_of, shortened
from lockstep.supervise.snapshot import RankPosition
from lockstep.supervise.stack import Stack, current_stack, stack_of

# -- causes --------------------------------------------------------------------------------------------------


TRACE = 100_000
"""Maximum length of a recorded traceback in characters. The mailbox limits the size of a message."""

SLACK = 0.5
"""Seconds by which the end of a process may be observed later than its consequences on other ranks."""

INTERRUPTED = "KeyboardInterrupt"
EXIT = "sys.exit("


@dataclass(frozen=True)
class Cause:
    """Record of an exception that ended a rank's script or one of the rank's Trainer calls."""

    rank: int
    at: float  #: seconds on the clock that the processes of this machine share (``time.monotonic``)
    reason: str  #: ``"ValueError: message"``
    location: str  #: ``"train.py:14"``: the innermost line of the user's code in the traceback
    trace: str  #: the traceback as Python prints it
    call: int = 0  #: the call that raised it, counted from 1; 0: no call
    lost: bool = False  #: whether it follows from another failure: a collective raised it, or it is a `RankFailed`
    doing: str = ""  #: what lockstep was doing for the rank

    @property
    def is_exit(self) -> bool:
        """True if the exception is a ``SystemExit``, for which Python prints no traceback."""
        return self.reason.startswith(EXIT)

    @property
    def is_interrupt(self) -> bool:
        """True if the exception is a ``KeyboardInterrupt`` from Ctrl-C, which is not a failure."""
        return self.reason.startswith(INTERRUPTED)

    def is_like(self, other: Cause) -> bool:
        """Return True if another rank's exception has the same type, message and line of the user's code."""
        return (self.reason, self.location, self.lost) == (other.reason, other.location, other.lost)

    def __str__(self) -> str:
        return f"rank {self.rank} failed first, at {self.location}: {self.reason}"


@dataclass(frozen=True)
class Divergence:
    """Description of a wait between ranks, for example one that never ends because the ranks' calls do not match."""

    text: str
    trace: str = ""  #: the Python stacks of the ranks, to be printed before the text

    def __str__(self) -> str:
        return self.text


def cause_of(rank: int, error: BaseException, call: int = 0, called: str = "") -> Cause:
    """Return the record for an exception. Call this function where the exception is caught.

    Args:
        rank: rank of this process.
        error: the exception.
        call: the call that raised it, counted from 1; 0: no call.
        called: the line of the user's code that made the call.
    """
    stack = stack_of(error)
    # a traceback starts at the frame that caught the exception
    stack = Stack(stack.frames + current_stack().frames)
    # torch raises RuntimeError for failed collectives; RankFailed is raised here for another rank's error
    lost = (stack.waits and isinstance(error, RuntimeError)) or isinstance(error, RankFailed)
    trace = shortened(error)[-TRACE:]
    return Cause(rank, time.monotonic(), reason_of(error), stack.location(called), trace, call, lost, stack.doing)


def first_cause(
    ended: list[Ended],
    noted: list[Cause],
    positions: Mapping[int, RankPosition] | None = None,
    caught: Sequence[Cause] = (),
    proof: Divergence | None = None,
) -> Ended | Cause | Divergence | None:
    """Return the first failure in a run, or None if nothing failed.

    A process that ended without a record (killed, crashed, ``os._exit``) breaks its connections. Exceptions on other
    ranks around that time are consequences. Otherwise, the earliest exception that no collective raised is the cause.
    If collectives raised all exceptions, either a rank had left, or the ranks' calls did not match.

    Args:
        ended: processes that failed by themselves, ordered by time.
        noted: records of ranks whose exceptions were not caught, ordered by time.
        positions: positions of the ranks, by rank.
        caught: records of exceptions that ended the newest call of a rank and that its script caught.
        proof: evidence that the ranks' calls did not match. Mismatched calls abort processes and break connections.
    """
    own = [cause for cause in noted if not cause.lost]
    silent = _silent_end(ended, noted, own)
    if silent is not None:
        # None: the exit code could not be read
        aborted = silent.code in (None, -signal.SIGABRT)
        return proof if proof is not None and aborted else silent
    if own:
        return own[0]
    if not noted:
        return None
    if caught:
        return caught[0]
    if proof is not None:
        return proof
    # Collectives raised all exceptions: a rank had left the call, or calls did not match.
    for cause in noted:
        for position in (positions or {}).values():
            if cause.call and has_left(position, cause.call) and position.at <= cause.at:
                return Divergence(has_left_call(position, [cause.rank], f"{cause.doing} ({cause.location})"))
    places = different_places({cause.rank: f"{cause.doing} ({cause.location})" for cause in noted})
    return Divergence(places) if places else noted[0]


def _silent_end(ended: list[Ended], noted: list[Cause], own: list[Cause]) -> Ended | None:
    """Return the first process that ended without leaving a record of an exception.

    Return None if there is no such process, or if a rank's own exception is clearly earlier.
    """
    ranks = {cause.rank for cause in noted}
    silent = next((end for end in ended if end.rank not in ranks), None)
    is_later = silent is not None and bool(own) and own[0].at < silent.at - SLACK
    return None if is_later else silent


def was_caught(cause: Cause, positions: Mapping[int, RankPosition]) -> bool:
    """Return True if the script caught the exception that ended the rank's newest call.

    The result is always False for exceptions that follow from another failure, such as a lost connection.
    """
    position = positions.get(cause.rank)
    return position is not None and not cause.lost and position.call == cause.call and not position.inside


def has_continued(cause: Cause, positions: Mapping[int, RankPosition]) -> bool:
    """Return True if a script caught an exception and made another call, while a rank is still in the failed call."""
    position = positions.get(cause.rank)
    if position is None or cause.lost or not 0 < cause.call < position.call:
        return False
    return any(other.inside and other.call == cause.call for other in positions.values())


def has_left(position: RankPosition, call: int) -> bool:
    """Return True if the rank has left the Trainer call with the number ``call``, or will never reach it."""
    return position.ended or position.call > call or (position.call == call and not position.inside)


def endless_wait(
    positions: Mapping[int, RankPosition], stacks: Mapping[int, Stack], everyone: bool
) -> Divergence | None:
    """Describe ranks whose wait for other ranks can never end. Return None if there are no such ranks.

    Args:
        positions: positions of the ranks of this node.
        stacks: stacks of the ranks that have been idle at the same place for a while.
        everyone: whether this node runs all ranks.
    """
    waiting = {rank: stack for rank, stack in stacks.items() if rank in positions and stack.waits}
    for rank, stack in sorted(waiting.items()):
        for position in positions.values():
            if has_left(position, positions[rank].call):
                return Divergence(has_left_call(position, [rank], stack.described(positions[rank].location)))
    calls = {position.call for position in positions.values()}
    if everyone and len(calls) == 1 and waiting.keys() == positions.keys():
        places = {rank: stack.described(positions[rank].location) for rank, stack in waiting.items()}
        text = different_places(places)
        return Divergence(text) if text else None
    return None


# -- messages ------------------------------------------------------------------------------------------------


CODE_OF_INTERRUPT = 128 + signal.SIGINT
"""Exit code of a run that Ctrl-C ended."""

First = Cause | Ended | Divergence


@dataclass(frozen=True)
class Judgement:
    """Final outcome of a run: the last message on the terminal, and the exit code."""

    text: str  #: text for the terminal; the last line is the first cause
    code: int


def early_cause(
    failed: Sequence[Ended],
    notes: Sequence[Cause],
    positions: Mapping[int, RankPosition],
    exiting: Collection[int] = (),
) -> Cause | Ended | None:
    """Return the run's first failure while ranks are still ending. Return None while the failure is uncertain.

    Lost connections alone are consequences, so the cause is still unknown.

    Args:
        failed: processes that failed by themselves, ordered by time.
        notes: records of the ranks' exceptions, ordered by time.
        positions: positions of the ranks, by rank.
        exiting: ranks whose scripts ended with an error and whose processes still run.
    """
    lost = {cause.rank for cause in notes if cause.lost}
    gone = {end.rank for end in failed} | set(exiting)
    own = [cause for cause in notes if not cause.lost and (cause.rank in gone or not was_caught(cause, positions))]
    caught = [cause for cause in notes if cause not in own and was_caught(cause, positions)]
    silent = _silent_end([end for end in failed if end.rank not in lost], own, own)
    if silent is not None:
        return silent
    if own:
        return own[0]
    return caught[0] if caught and lost & gone else None


def final_cause(
    failed: Sequence[Ended],
    notes: Sequence[Cause],
    positions: Mapping[int, RankPosition],
    exiting: Mapping[int, Cause],
    printing: Collection[int],
    proof: Divergence | None = None,
    folded: Collection[int] = (),
) -> tuple[First | None, bool]:
    """Return (first failure, True if its traceback is printed already) of a run after all its processes have ended.

    Args:
        failed, notes, positions: as for `early_cause`.
        exiting: errors that ended the scripts of ranks that still wait for permission to exit, by rank.
        printing: ranks whose tracebacks are on the terminal, whether their processes failed or were ended.
        folded: ranks that printed no traceback, because another rank of the node had printed one for the same error.
        proof: evidence that ranks were in different collectives, if there is any.

    Returns:
        the cause, and whether its traceback is already on the terminal.
    """
    printed = {end.rank for end in failed} | exiting.keys() | set(printing)
    noted = {cause.rank: cause for cause in notes if cause.rank in printed} | dict(exiting)
    caught = [cause for cause in notes if cause.rank not in noted and was_caught(cause, positions)]
    in_time = sorted(noted.values(), key=lambda cause: cause.at)
    cause = first_cause(list(failed), in_time, positions, caught, proof)
    return cause, is_printed(cause, printed - set(folded), in_time)


def is_printed(cause: First | None, printed: Collection[int], notes: Iterable[Cause] = ()) -> bool:
    """Return True if the terminal shows the traceback of the first failure, or of another rank with the same error.

    The result is also True for ``sys.exit()``, which has no traceback.

    Args:
        cause: the first cause.
        printed: ranks whose tracebacks are on the terminal.
        notes: records of all exceptions.
    """
    if not isinstance(cause, Cause):
        return False
    like = {cause.rank} | {note.rank for note in notes if note.is_like(cause)}
    return cause.is_exit or (not cause.lost and not like.isdisjoint(printed))


OTHERS = 2
"""Maximum number of further kinds of failure with a line of their own."""


def also_failed(cause: First | None, notes: Iterable[Cause], host: str = "") -> list[str]:
    """Return one line for each kind of failure after the first one. Kinds after the first `OTHERS` share a line.

    Args:
        cause: the first cause.
        notes: records of all ranks.
        host: name of this machine; "" if there is only one.
    """
    first = getattr(cause, "rank", None)
    own = [each for each in notes if not (each.lost or each.is_interrupt) and each.rank != first]
    like = sorted(each.rank for each in own if isinstance(cause, Cause) and each.is_like(cause))
    where = f" on {host}" if host else ""
    lines = [f"{rank_list(like)}{where} failed in the same way"] if like else []
    ways = group_ranks((each.rank, f"at {each.location}: {each.reason}") for each in own if each.rank not in like)
    lines += [f"{rank_list(sorted(ranks))}{where} failed, too, {words}" for words, ranks in ways[:OTHERS]]
    rest = sorted(rank for _, ranks in ways[OTHERS:] for rank in ranks)
    return [*lines, f"{rank_list(rest)}{where} failed in other ways"] if rest else lines


def judgement(
    cause: First | None,
    printed: bool,
    interrupted: bool,
    codes: Sequence[int | None],
    host: str = "",
    also: Sequence[str] = (),
) -> Judgement:
    """Return the final message and the exit code for the run's first failure.

    Args:
        cause: the first cause; None where Ctrl-C ended the run before anything failed.
        printed: whether its traceback is already on the terminal.
        interrupted: whether Ctrl-C was pressed.
        codes: exit codes of the processes that failed.
        host: name of this machine; "" if there is only one.
        also: lines to print before the last one.
    """
    by_hand = interrupted or (isinstance(cause, Cause) and cause.is_interrupt)
    trace = "" if printed or by_hand else getattr(cause, "trace", "")
    if by_hand:
        words = "interrupted by Ctrl-C" + (f": {cause}" if isinstance(cause, Divergence) else "")
        return Judgement(f"lockstep: {one_line(words, None)}", CODE_OF_INTERRUPT)
    code = max((code for code in codes if code is not None), default=1)
    if isinstance(cause, Ended) and cause.code in (-signal.SIGINT, -signal.SIGTERM):
        code = 128 - cause.code  # as a shell reports it
    lines = [f"lockstep: {one_line(each, None)}" for each in (*also, with_host(cause, host))]
    return Judgement("\n".join([trace.rstrip()] * bool(trace) + lines), code if code > 0 else 1)


def with_host(cause: First | None, host: str) -> str:
    """Return the message for a cause. With a host name, the name is inserted after the rank."""
    if not host or cause is None or isinstance(cause, Divergence):
        return str(cause)
    return str(cause).replace(f"rank {cause.rank}", f"rank {cause.rank} on {host}", 1)
