"""Detection of hangs from the ranks' traces, stacks and process states. Pure functions.

Proofs end a run at once: two ranks did different things as the same collective of one group (`diverged`), or a rank was
stopped while others wait for it (`stopped`). Anything else may resolve itself: a rank that is busy outside a collective
has a good reason to keep others waiting. Such a wait is reported once (`overdue`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.supervise.causes import Divergence
from lockstep.supervise.hang_text import different_calls, long_wait, stacks_of, stopped_ranks
from lockstep.supervise.snapshot import RUNS, SLEEPS, STOPPED, RankSnapshot
from lockstep.supervise.trace_memory import Note

HALTED = 1.0
"""Seconds after which a stopped rank that others wait for counts as failed."""


# -- proofs


CollectiveKey = tuple[str, tuple[int, ...], int]
"""Key of a collective, equal on all ranks. It contains the group's name and members, and a number."""


def key_of(note: Note) -> CollectiveKey:
    """Return the key of the collective that a note records. All ranks' notes of one collective have the same key."""
    return note.group, note.members, note.number


Call = tuple[int, str, Note]
"""A rank's call. It contains the rank, the line of the user's code, and the note."""


def differing(made: Iterable[Call], sizes: bool = False) -> list[Call]:
    """Return all ranks' calls in the first collective with mismatched calls, or an empty list if all match.

    Args:
        made: the ranks' calls.
        sizes: whether different sizes also count while a rank is still inside. Gloo rejects different sizes.
    """
    found: dict[CollectiveKey, list[Call]] = {}
    for rank, where, note in made:
        if note.whole and note.number:
            found.setdefault(key_of(note), []).append((rank, where, note))
    for calls in sorted(found.values(), key=lambda calls: calls[0][2].number):
        first, notes = calls[0][2], [note for _, _, note in calls]
        if any(first.differs(note) for note in notes):
            return calls
        if sizes and any(first.clashes(note) for note in notes) and any(note.inside for note in notes):
            return calls
    return []


def mismatched(made: Iterable[Call]) -> Divergence | None:
    """Describe the first collective in which the ranks' calls do not match. Return None if all match.

    Different sizes count while a rank is still inside the call.
    """
    calls = differing(made, sizes=True)
    return Divergence(different_calls(calls)) if calls else None


def diverged(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Describe the first collective in which ranks' calls do not match, and add stacks. Return None if all match."""
    calls = differing((each.rank, location_of(each, note), note) for each in snapshots for note in each.notes)
    return Divergence(different_calls(calls), stacks_of(snapshots)) if calls else None


def location_of(snapshot: RankSnapshot, note: Note) -> str:
    """Return the line of the user's code that called a collective.

    If autograd called it, the line comes from the rank's stack or Trainer call.
    """
    if note.location or not note.inside or snapshot.stack is None:
        return note.location or snapshot.position.location
    return snapshot.stack.location(snapshot.position.location)


def stopped(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Describe ranks that a signal (not a debugger) suspended while other ranks wait; None if there are none."""
    halted = [snapshot for snapshot in snapshots if snapshot.state == STOPPED and snapshot.stopped >= HALTED]
    waiting = [snapshot for snapshot in snapshots if snapshot.state in (RUNS, SLEEPS) and snapshot.waited >= HALTED / 2]
    if not halted or not waiting:
        return None
    return Divergence(stopped_ranks(halted, waiting), stacks_of(snapshots))


# -- long waits


def late_ranks(snapshots: Sequence[RankSnapshot], waiting: Iterable[RankSnapshot]) -> set[int]:
    """Return the ranks that have not yet reached a collective for which other ranks' devices wait."""
    awaited = {key_of(note) for snapshot in waiting if (note := snapshot.queued) is not None and note.whole}
    if not awaited:
        return set()
    late = set()
    for snapshot in snapshots:
        newest: dict[tuple[str, tuple[int, ...]], int] = {}
        for note in snapshot.notes:  # the newest first
            if note.number:
                newest.setdefault((note.group, note.members), note.number)
        for group, members, number in awaited:
            if snapshot.rank in members and newest.get((group, members), number) < number:
                late.add(snapshot.rank)
    return late


def overdue(snapshots: Sequence[RankSnapshot], limit: float) -> Divergence | None:
    """Describe ranks that have waited for at least ``limit`` seconds. Return None if no rank has waited that long."""
    waiting = [snapshot for snapshot in snapshots if snapshot.waited >= limit]
    if not waiting:
        return None
    seconds = max(snapshot.waited for snapshot in waiting)
    # a rank that others wait for may wait itself, in an earlier collective: it is named among the others
    late = late_ranks(snapshots, waiting)
    waiting = [snapshot for snapshot in waiting if snapshot.rank not in late] or waiting
    long = {snapshot.rank for snapshot in waiting}
    others = [snapshot for snapshot in snapshots if snapshot.rank not in long]
    return Divergence(long_wait(seconds, others, waiting), stacks_of(snapshots))
