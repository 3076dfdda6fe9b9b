"""The first cause of a failure: found among what all ranks left, and put into words. Pure."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.ground.errors import RankFailed
from lockstep.launch.processes import Ended
from lockstep.supervise.screen_text import one_line, reason_of, shortened
from lockstep.supervise.stack import Stack, calling, stack_of

# -- the causes ----------------------------------------------------------------------------------------------


TRACE = 100_000
"""Characters of a traceback that are noted: what takes a note in has a limit."""

SLACK = 0.5
"""Seconds by which the end of a process may be seen later than what follows from it in the others."""

INTERRUPTED = "KeyboardInterrupt"
EXIT = "sys.exit("
RULE = "All ranks must make the same calls."


@dataclass(frozen=True)
class Cause:
    """An exception that came out of a rank's run."""

    rank: int
    at: float  #: seconds on the clock that the processes of this machine share (``time.monotonic``)
    reason: str  #: ``"ValueError: what it said"``
    location: str  #: ``"train.py:14"``: the line of the user's code that raised it, or was on the way to it
    trace: str  #: the traceback as Python prints it
    call: int = 0  #: the call in which it came, counted from 1; 0: in none
    lost: bool = False  #: whether it follows from another failure: a collective raised it, or a `RankFailed` is it
    doing: str = ""  #: what lockstep was doing for the rank

    @property
    def is_exit(self) -> bool:
        """Whether it is a ``sys.exit()``, of which Python prints no traceback."""
        return self.reason.startswith(EXIT)

    @property
    def is_interrupt(self) -> bool:
        """Whether this is a Ctrl-C, not a failure."""
        return self.reason.startswith(INTERRUPTED)

    def is_like(self, other: Cause) -> bool:
        """Whether another rank failed of the same, at the same line."""
        return (self.reason, self.location, self.lost) == (other.reason, other.location, other.lost)

    def __str__(self) -> str:
        return f"rank {self.rank} failed first, at {self.location}: {self.reason}"


@dataclass(frozen=True)
class Stand:
    """Where a rank stands: in which of its calls, or behind which."""

    rank: int
    at: float  #: since when, on the clock of ``time.monotonic``
    call: int  #: which call, counted from 1
    inside: bool  #: whether it is in the call, or has come out of it
    location: str  #: the line of the user's code that called
    process: int = 0  #: id of the rank's process
    answers: str = ""  #: where it answers for its stack
    ended: bool = False  #: whether its process has come to its end
    collectives: str = ""  #: where its trace of collectives lies
    hang_timeout: float | None = None  #: seconds of waiting after which it is told who waits for whom; None: never
    hang_kill: float | None = None  #: seconds of waiting after which the run is ended; None: never


@dataclass(frozen=True)
class Divergence:
    """Ranks that went different ways, so that each would have waited for another for ever."""

    text: str
    trace: str = ""  #: the Python stacks of the ranks, to be printed before the text

    def __str__(self) -> str:
        return self.text


def cause_of(rank: int, error: BaseException, call: int = 0, called: str = "") -> Cause:
    """The note on an exception, taken where it is caught.

    Args:
        rank: of this process.
        error: the exception.
        call: in which call it came.
        called: the line of the user's code that made the call.
    """
    stack = stack_of(error)
    stack = Stack(stack.frames + calling().frames)  # a traceback begins where the exception was caught
    # torch's errors of collectives are RuntimeErrors; a RankFailed is what an error of another rank's makes of this one
    lost = (stack.waits and isinstance(error, RuntimeError)) or isinstance(error, RankFailed)
    trace = shortened(error)[-TRACE:]
    return Cause(rank, time.monotonic(), reason_of(error), stack.location(called), trace, call, lost, stack.doing)


def first_cause(
    ended: list[Ended],
    noted: list[Cause],
    stands: Mapping[int, Stand] | None = None,
    caught: Sequence[Cause] = (),
    proof: Divergence | None = None,
) -> Ended | Cause | Divergence | None:
    """What ended the run; None if nothing failed.

    A process that ended without a note (killed, crashed, ``os._exit``) breaks the connections to it, so
    exceptions of other ranks about that moment are its consequences. Else the earliest exception counts that
    did not come out of a collective. Where all did, either a rank had left, or the ranks' calls did not match.

    Args:
        ended: processes that failed by themselves, in order of time.
        noted: notes of ranks whose failure was not caught, in order of time.
        stands: where the ranks stand, by rank.
        caught: notes of ranks that did not fail, for their scripts caught what came out of their newest calls.
        proof: that the ranks' calls did not match, which aborts processes and breaks connections.
    """
    own = [cause for cause in noted if not cause.lost]
    silent = _silent_end(ended, noted, own)
    if silent is not None:
        aborted = silent.code in (None, -signal.SIGABRT)  # None: nobody could ask
        return proof if proof is not None and aborted else silent
    if own:
        return own[0]
    if not noted:
        return None
    if caught:
        return caught[0]
    if proof is not None:
        return proof
    # All exceptions came out of collectives: a rank had left, or calls did not match.
    return _gone(noted, stands or {}) or mismatch({c.rank: f"{c.doing} ({c.location})" for c in noted}) or noted[0]


def _silent_end(ended: list[Ended], noted: list[Cause], own: list[Cause]) -> Ended | None:
    """The first process that ended without a note, unless an exception of a rank's own came clearly before."""
    ranks = {cause.rank for cause in noted}
    silent = next((end for end in ended if end.rank not in ranks), None)
    is_later = silent is not None and bool(own) and own[0].at < silent.at - SLACK
    return None if is_later else silent


def _gone(lost: list[Cause], stands: Mapping[int, Stand]) -> Divergence | None:
    """The rank that had left a call before others lost it there."""
    for cause in lost:
        for stand in stands.values():
            if cause.call and has_left(stand, cause.call) and stand.at <= cause.at:
                return left(stand, [cause.rank], f"{cause.doing} ({cause.location})")
    return None


def was_caught(cause: Cause, stands: Mapping[int, Stand]) -> bool:
    """Whether an exception of its rank's own ended the newest call of that rank, and the script did not mind."""
    stand = stands.get(cause.rank)
    return stand is not None and not cause.lost and stand.call == cause.call and not stand.inside


def went_on(cause: Cause, stands: Mapping[int, Stand]) -> bool:
    """Whether an exception of its rank's own ended a call in which others still are, and its script went on."""
    stand = stands.get(cause.rank)
    if stand is None or cause.lost or not 0 < cause.call < stand.call:
        return False
    return any(other.inside and other.call == cause.call for other in stands.values())


def has_left(stand: Stand, call: int) -> bool:
    """Whether a rank that stands there has come out of the ``call``, or will never get to it."""
    return stand.ended or stand.call > call or (stand.call == call and not stand.inside)


def left(stand: Stand, waiting: Sequence[int], where: str) -> Divergence:
    """A rank came out of a call, or to its end, and others wait for it."""
    did = f"left the call at {stand.location}" if stand.call else "made no call"
    if stand.ended:
        did += " and came to its end"
    return Divergence(f"rank {stand.rank} {did}, and {named(waiting)} waits for it in {where}. {RULE}")


def mismatch(doings: Mapping[int, str]) -> Divergence | None:
    """Ranks wait for one another at different places; None if it is the same one.

    Args:
        doings: what each does, and where, by rank.
    """
    groups = alike(sorted(doings.items()))
    if len(groups) < 2:
        return None
    parts = [f"{named(ranks)} in {doing}" for doing, ranks in odd_first(groups)]
    return Divergence(f"the ranks wait for one another at different places: {'; '.join(parts)}. {RULE}")


def alike(said: Iterable[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    """What is said of ranks, each thing once, with the ranks of which it is said."""
    groups: dict[str, list[int]] = {}
    for rank, words in said:
        groups.setdefault(words, []).append(rank)
    return list(groups.items())


def odd_first(groups: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """What is said of the fewest ranks first."""
    return sorted(groups, key=lambda group: len(group[1]))


def named(ranks: Sequence[int]) -> str:
    """``"rank 3"``, ``"ranks 0, 2"`` or ``"ranks 0-2, 7"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def strayed(stands: Mapping[int, Stand], stacks: Mapping[int, Stack], everyone: bool) -> Divergence | None:
    """Whether ranks that stand still wait for something that cannot come.

    Args:
        stands: where the ranks of this node stand.
        stacks: of those that do nothing, in one and the same place for a while.
        everyone: whether the ranks of this node are all there are.
    """
    waiting = {rank: stack for rank, stack in stacks.items() if rank in stands and stack.waits}
    for rank, stack in sorted(waiting.items()):
        for stand in stands.values():
            if has_left(stand, stands[rank].call):
                return left(stand, [rank], stack.described(stands[rank].location))
    calls = {stand.call for stand in stands.values()}
    if everyone and len(calls) == 1 and waiting.keys() == stands.keys():
        return mismatch({rank: stack.described(stands[rank].location) for rank, stack in waiting.items()})
    return None


# -- the words -----------------------------------------------------------------------------------------------


CODE_OF_INTERRUPT = 128 + signal.SIGINT
"""The exit code of a run that Ctrl-C has ended."""

First = Cause | Ended | Divergence


@dataclass(frozen=True)
class Judgement:
    """What is to be said of a run, and its exit code."""

    text: str  #: for the screen; its last line is the first cause
    code: int


def early_cause(
    failed: Sequence[Ended], notes: Sequence[Cause], stands: Mapping[int, Stand], left: Collection[int] = ()
) -> Cause | Ended | None:
    """The first cause, as soon as it is certain; None while a rank that has lost another is all that is known.

    Args:
        failed: processes that failed by themselves, in order of time.
        notes: of ranks on their exceptions, in order of time.
        stands: where the ranks stand, by rank.
        left: ranks whose scripts an error has ended, and whose processes still run.
    """
    lost = {cause.rank for cause in notes if cause.lost}
    gone = {end.rank for end in failed} | set(left)
    own = [cause for cause in notes if not cause.lost and (cause.rank in gone or not was_caught(cause, stands))]
    caught = [cause for cause in notes if cause not in own and was_caught(cause, stands)]
    silent = _silent_end([end for end in failed if end.rank not in lost], own, own)
    if silent is not None:
        return silent
    if own:
        return own[0]
    return caught[0] if caught and lost & gone else None


def final_cause(
    failed: Sequence[Ended],
    notes: Sequence[Cause],
    stands: Mapping[int, Stand],
    left: Mapping[int, Cause],
    shown: Collection[int],
    proof: Divergence | None = None,
    folded: Collection[int] = (),
) -> tuple[First | None, bool]:
    """The first cause, now that all have ended.

    Args:
        failed, notes, stands: as for `early_cause`.
        left: the errors that ended the scripts of ranks which still wait to be told that they may end, by rank.
        shown: ranks whose tracebacks are on the screen, whether their processes failed or were ended.
        folded: ranks that left it to others to print theirs.
        proof: that ranks were in different collectives, where it is known.

    Returns:
        it, and whether its traceback is on the screen already.
    """
    printed = {end.rank for end in failed} | left.keys() | set(shown)
    noted = {cause.rank: cause for cause in notes if cause.rank in printed} | dict(left)
    caught = [cause for cause in notes if cause.rank not in noted and was_caught(cause, stands)]
    in_time = sorted(noted.values(), key=lambda cause: cause.at)
    cause = first_cause(list(failed), in_time, stands, caught, proof)
    return cause, is_told(cause, printed - set(folded), in_time)


def is_told(cause: First | None, printed: Collection[int], notes: Iterable[Cause] = ()) -> bool:
    """Whether the traceback of a cause is on the screen, where those of the ranks ``printed`` are, or one like it."""
    if not isinstance(cause, Cause):
        return False
    like = {cause.rank} | {note.rank for note in notes if note.is_like(cause)}
    return cause.is_exit or (not cause.lost and not like.isdisjoint(printed))


OTHERS = 2
"""Ways in which other ranks failed that are told."""


def also_failed(cause: First | None, notes: Iterable[Cause], host: str = "") -> list[str]:
    """What ranks failed of beside the first cause, a line for each way of failing, and for all beyond `OTHERS`.

    Args:
        cause: the first.
        notes: of all ranks.
        host: the name of this machine, where it has to be told from others.
    """
    first = getattr(cause, "rank", None)
    own = [each for each in notes if not (each.lost or each.is_interrupt) and each.rank != first]
    like = sorted(each.rank for each in own if isinstance(cause, Cause) and each.is_like(cause))
    where = f" on {host}" if host else ""
    lines = [f"{named(like)}{where} failed alike"] if like else []
    ways = alike((each.rank, f"at {each.location}: {each.reason}") for each in own if each.rank not in like)
    lines += [f"{named(sorted(ranks))}{where} failed, too, {words}" for words, ranks in ways[:OTHERS]]
    rest = sorted(rank for _, ranks in ways[OTHERS:] for rank in ranks)
    return [*lines, f"{named(rest)}{where} failed in other ways"] if rest else lines


def judgement(
    cause: First | None,
    told: bool,
    interrupted: bool,
    codes: Sequence[int | None],
    host: str = "",
    also: Sequence[str] = (),
) -> Judgement:
    """What follows from a first cause.

    Args:
        cause: it; None where Ctrl-C ended the run before anything failed.
        told: whether its traceback is on the screen.
        interrupted: whether Ctrl-C had been pressed.
        codes: of the processes that failed.
        host: the name of this machine, where it has to be told from others.
        also: what is told before the last line.
    """
    by_hand = interrupted or (isinstance(cause, Cause) and cause.is_interrupt)
    trace = "" if told or by_hand else getattr(cause, "trace", "")
    if by_hand:
        words = "interrupted by Ctrl-C" + (f": {cause}" if isinstance(cause, Divergence) else "")
        return Judgement(f"lockstep: {one_line(words, None)}", CODE_OF_INTERRUPT)
    code = max((code for code in codes if code is not None), default=1)
    if isinstance(cause, Ended) and cause.code in (-signal.SIGINT, -signal.SIGTERM):
        code = 128 - cause.code  # as a shell reports it
    lines = [f"lockstep: {one_line(each, None)}" for each in (*also, located(cause, host))]
    return Judgement("\n".join([trace.rstrip()] * bool(trace) + lines), code if code > 0 else 1)


def located(cause: First | None, host: str) -> str:
    """A cause in words, with the host of its rank."""
    if not host or cause is None or isinstance(cause, Divergence):
        return str(cause)
    return str(cause).replace(f"rank {cause.rank}", f"rank {cause.rank} on {host}", 1)
