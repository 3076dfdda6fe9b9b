"""The judgement on a run that failed: its first cause, the last line on the screen, and the exit code."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lockstep.launch.causes import Cause, Stand, Stray, first_cause, was_caught
from lockstep.launch.children import Ended
from lockstep.launch.stack import one_line

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a run that Ctrl-C has ended."""

First = Cause | Ended | Stray


@dataclass(frozen=True)
class Judgement:
    """What is to be said of a run, and its exit code."""

    text: str  #: for the screen; its last line is the first cause
    code: int


def settled(
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
    found = first_cause([end for end in failed if end.rank not in lost], own, stands, caught)
    if found is None and caught and lost & gone:
        return caught[0]
    return found if isinstance(found, Cause | Ended) else None


def concluded(
    failed: Sequence[Ended],
    notes: Sequence[Cause],
    stands: Mapping[int, Stand],
    left: Mapping[int, Cause],
    shown: Collection[int],
    proof: Stray | None = None,
) -> tuple[First | None, bool]:
    """The first cause, now that all have ended.

    Args:
        failed, notes, stands: as for `settled`.
        left: the errors that ended the scripts of ranks which still wait to be told that they may end, by rank.
        shown: ranks whose tracebacks are on the screen, whether their processes failed or were ended.
        proof: that ranks were in different collectives, where it is known.

    Returns:
        it, and whether its traceback is on the screen already.
    """
    printed = {end.rank for end in failed} | left.keys() | set(shown)
    noted = {cause.rank: cause for cause in notes if cause.rank in printed} | dict(left)
    caught = [cause for cause in notes if cause.rank not in noted and was_caught(cause, stands)]
    in_time = sorted(noted.values(), key=lambda cause: cause.at)
    cause = first_cause(list(failed), in_time, stands, caught, **({} if proof is None else {"proof": proof}))
    return cause, is_told(cause, printed)


def is_told(cause: First | None, printed: Collection[int]) -> bool:
    """Whether the traceback of a cause is on the screen, where those of the ranks ``printed`` are."""
    return isinstance(cause, Cause) and (cause.is_exit or (cause.rank in printed and not cause.lost))


def judgement(
    cause: First | None, told: bool, interrupted: bool, codes: Sequence[int | None], host: str = ""
) -> Judgement:
    """What follows from a first cause.

    Args:
        cause: it; None where Ctrl-C ended the run before anything failed.
        told: whether its traceback is on the screen.
        interrupted: whether Ctrl-C had been pressed.
        codes: of the processes that failed.
        host: the name of this machine, where it has to be told from others.
    """
    by_hand = interrupted or (isinstance(cause, Cause) and cause.is_interrupt)
    trace = "" if told or by_hand else getattr(cause, "trace", "")
    if by_hand:
        words = "interrupted by Ctrl-C" + (f": {cause}" if isinstance(cause, Stray) else "")
        return Judgement(f"lockstep: {one_line(words, None)}", INTERRUPTED)
    code = max((code for code in codes if code is not None), default=1)
    words = one_line(located(cause, host), None)
    return Judgement(f"{trace.rstrip()}\n" * bool(trace) + f"lockstep: {words}", code if code > 0 else 1)


def located(cause: First | None, host: str) -> str:
    """A cause in words, with the host of its rank."""
    if not host or cause is None or isinstance(cause, Stray):
        return str(cause)
    return str(cause).replace(f"rank {cause.rank}", f"rank {cause.rank} on {host}", 1)
