"""Detection of hangs from the ranks' traces, stacks and process states. Pure functions.

Proofs end a run at once: two ranks did different things as the same collective of one group (`diverged`), or a rank was
stopped while others wait for it (`stopped`). Anything else may resolve itself: a rank that is busy outside a collective
has a good reason to keep others waiting. Such a wait is reported once (`overdue`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.supervise.causes import RULE, Divergence, alike, named, odd_first
from lockstep.supervise.snapshot import RUNS, SLEEPS, STOPPED, RankSnapshot, told, traced, when_of
from lockstep.supervise.trace_memory import Note

HALTED = 1.0
"""Seconds after which a stopped rank is given up if others wait for it."""


# -- proofs


CollectiveKey = tuple[str, tuple[int, ...], int]
"""A collective of a group: group name, members, number."""


def key_of(note: Note) -> CollectiveKey:
    """Return the key_of of a note."""
    return note.group, note.members, note.number


Call = tuple[int, str, Note]
"""What a rank did: rank, line of the user's code, note."""


def differing(made: Iterable[Call], sizes: bool = False) -> list[Call]:
    """Return the calls at the first key_of where ranks did different things, or an empty list.

    Args:
        made: what the ranks did.
        sizes: whether different sizes count, too, if a rank is still inside. Gloo rejects different sizes.
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
    """Return the mismatch of ranks in one collective, if any. Different sizes count if a rank is still inside."""
    calls = differing(made, sizes=True)
    return parted(calls) if calls else None


def diverged(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Return the mismatch of ranks in the same collective of one group, with their stacks, if any."""
    calls = differing((each.rank, location_of(each, note), note) for each in snapshots for note in each.notes)
    return parted(calls, traced(snapshots)) if calls else None


def location_of(snapshot: RankSnapshot, note: Note) -> str:
    """Return the line that called a collective. For autograd's threads, use the rank's stack or its own call."""
    if note.location or not note.inside or snapshot.stack is None:
        return note.location or snapshot.position.location
    return snapshot.stack.location(snapshot.position.location)


def parted(calls: Iterable[Call], trace: str = "") -> Divergence:
    """Return the mismatch message for calls of one collective.

    Args:
        calls: what the ranks did.
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
    """Return the failure of a stopped rank that others wait for, if any. Ranks under a debugger are ignored."""
    halted = [snapshot for snapshot in snapshots if snapshot.state == STOPPED and snapshot.stopped >= HALTED]
    waiting = [snapshot for snapshot in snapshots if snapshot.state in (RUNS, SLEEPS) and snapshot.waited >= HALTED / 2]
    if not halted or not waiting:
        return None
    return Divergence(f"{told(halted)} (SIGSTOP), and {told(waiting)}", traced(snapshots))


# -- long waits


def _newest(snapshot: RankSnapshot) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return the number of the newest collective of each group in a rank's notes."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for note in snapshot.notes:
        if note.number:
            found.setdefault((note.group, note.members), note.number)
    return found


def behind_of(snapshots: Sequence[RankSnapshot], waiting: Iterable[RankSnapshot]) -> set[int]:
    """Return the ranks that have not reached a collective that others have queued on a device.

    A rank may be waiting in another collective instead.
    """
    awaited = {key_of(note): note for snapshot in waiting if (note := snapshot.queued) is not None and note.whole}
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
    """Describe the ranks that have waited for more than ``limit`` seconds, and the others. Return None if none has."""
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
