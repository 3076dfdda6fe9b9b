"""Who diverges: what the ranks' traces, stacks and processes say together, once somebody waits. Pure functions.

Proofs end a run at once: two ranks did different things as the same collective of one group (`diverged`); a rank has
been stopped, and others wait for it (`stopped`). All else may come right: a rank that is busy outside a collective
keeps others waiting with good reason. It is told once (`overdue`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.supervise.causes import RULE, Divergence, alike, named, odd_first
from lockstep.supervise.snapshot import RUNS, SLEEPS, STOPPED, RankSnapshot, told, traced, when_of
from lockstep.supervise.trace_memory import Note

HALTED = 1.0
"""Seconds after which a rank that was stopped is given up, where others wait for it."""


# -- proofs


Position = tuple[str, tuple[int, ...], int]
"""A collective of a group: the group's name, its members, the number."""


def position(note: Note) -> Position:
    """As which collective of which group a note was made."""
    return note.group, note.members, note.number


Call = tuple[int, str, Note]
"""What a rank did: its number, the line of the user's code, and the note."""


def differing(made: Iterable[Call], sizes: bool = False) -> list[Call]:
    """What was done as the first collective of a group as which ranks did different things; nothing if there is none.

    Args:
        made: what ranks did.
        sizes: whether other sizes count, too, which gloo refuses, where some have not come out of the collective.
    """
    found: dict[Position, list[Call]] = {}
    for rank, where, note in made:
        if note.whole and note.number:
            found.setdefault(position(note), []).append((rank, where, note))
    for calls in sorted(found.values(), key=lambda calls: calls[0][2].number):
        first, notes = calls[0][2], [note for _, _, note in calls]
        if any(first.differs(note) for note in notes):
            return calls
        if sizes and any(first.clashes(note) for note in notes) and any(note.inside for note in notes):
            return calls
    return []


def mismatched(made: Iterable[Call]) -> Divergence | None:
    """Ranks that did different things as one collective, or brought other sizes to one that some have not come out
    of."""
    calls = differing(made, sizes=True)
    return parted(calls) if calls else None


def diverged(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Ranks that did different things as the same collective of one group."""
    calls = differing((each.rank, location_of(each, note), note) for each in snapshots for note in each.notes)
    return parted(calls, traced(snapshots)) if calls else None


def location_of(snapshot: RankSnapshot, note: Note) -> str:
    """Where a collective was called; autograd's own threads have no line of the user's, but who waits for them has."""
    if note.location or not note.inside or snapshot.stack is None:
        return note.location or snapshot.stand.location
    return snapshot.stack.location(snapshot.stand.location)


def parted(calls: Iterable[Call], trace: str = "") -> Divergence:
    """What different ranks did as one collective.

    Args:
        calls: what they did.
        trace: stacks of the ranks.
    """
    said = []
    for rank, location, note in sorted(calls, key=lambda call: call[0]):
        verb = "waits in" if note.inside else "called"
        payload = f" of {note.payload}" if note.payload else ""
        root = f" with rank {note.root}" if note.root >= 0 else ""
        said.append((rank, f"{verb} {note.named}{payload}{root}, {location}{when_of(note)}"))
    told = "; ".join(f"{named(ranks)} {what}" for what, ranks in odd_first(alike(said)))
    return Divergence(f"the ranks' calls do not match: {told}. {RULE}", trace)


def stopped(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """A rank that somebody has stopped, for which others wait. A debugger's, that stops and goes on, is let be."""
    halted = [snapshot for snapshot in snapshots if snapshot.state == STOPPED and snapshot.stopped >= HALTED]
    waiting = [snapshot for snapshot in snapshots if snapshot.state in (RUNS, SLEEPS) and snapshot.waited >= HALTED / 2]
    if not halted or not waiting:
        return None
    return Divergence(f"{told(halted)} (SIGSTOP), and {told(waiting)}", traced(snapshots))


# -- no proofs


def _newest(snapshot: RankSnapshot) -> dict[tuple[str, tuple[int, ...]], int]:
    """Of each group that a rank's notes tell of, the number of its newest collective."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for note in snapshot.notes:
        if note.number:
            found.setdefault((note.group, note.members), note.number)
    return found


def behind_of(snapshots: Sequence[RankSnapshot], waiting: Iterable[RankSnapshot]) -> set[int]:
    """The ranks that have not come to what some have in a device's queue; in another one they may wait as well."""
    awaited = {position(note): note for snapshot in waiting if (note := snapshot.queued) is not None and note.whole}
    if not awaited:
        return set()
    found = set()
    for snapshot in snapshots:
        newest = _newest(snapshot)
        for group, names, number in awaited:
            if snapshot.rank in names and newest.get((group, names), number) < number:
                found.add(snapshot.rank)
    return found


def overdue(snapshots: Sequence[RankSnapshot], limit: float) -> Divergence | None:
    """That ranks have waited longer than so many seconds, and what the others do."""
    waiting = [snapshot for snapshot in snapshots if snapshot.waited >= limit]
    if not waiting:
        return None
    seconds = max(snapshot.waited for snapshot in waiting)
    behind = behind_of(snapshots, waiting)
    waiting = [snapshot for snapshot in waiting if snapshot.rank not in behind] or waiting
    long = {snapshot.rank for snapshot in waiting}
    others = [snapshot for snapshot in snapshots if snapshot.rank not in long]
    said = "; ".join(filter(None, [told(others), told(waiting)]))
    return Divergence(f"for {seconds:.0f} s, {said}", traced(snapshots))
