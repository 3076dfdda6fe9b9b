"""Who diverges: what the ranks' traces, stacks and processes say together, once somebody waits. Pure functions.

Proofs end a run at once: two ranks did different things as the same collective of one group (`diverged`); ranks wait
for one another in a circle (`circle`); a rank has been stopped, and others wait for it (`stopped`). All else may come
right: a rank that is busy outside a collective keeps others waiting with good reason. It is told once (`overdue`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from lockstep.supervise.causes import RULE, Divergence, alike, named, odd_first
from lockstep.supervise.snapshot import RUNS, SLEEPS, STOPPED, RankSnapshot, told, traced
from lockstep.supervise.trace_memory import LAG, Note

TOGETHER = {
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "all_gather_object",
}
"""Collectives that no rank comes out of before all have gone in."""

HALTED = 1.0
"""Seconds after which a rank that was stopped is given up, where others wait for it."""


# -- proofs


def compare(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Whether ranks wait, or will, for what cannot come.

    Args:
        snapshots: of all ranks that can be seen.
    """
    return diverged(snapshots) or circle(snapshots) or stopped(snapshots)


Position = tuple[str, tuple[int, ...], int]
"""A collective of a group: the group's name, its members, the number."""


def position(note: Note) -> Position:
    """As which collective of which group a note was made."""
    return note.group, note.members, note.number


Who = TypeVar("Who")


def differing(made: Iterable[tuple[Who, Note]], sizes: bool = False) -> list[tuple[Who, Note]]:
    """What was done as the first collective of a group as which ranks did different things; nothing if there is none.

    Args:
        made: notes, and of whom each is.
        sizes: whether other sizes count, too, which gloo refuses, where some have not come out of the collective.
    """
    found: dict[Position, list[tuple[Who, Note]]] = {}
    for who, note in made:
        if note.whole and note.number:
            found.setdefault(position(note), []).append((who, note))
    for calls in sorted(found.values(), key=lambda calls: calls[0][1].number):
        first, notes = calls[0][1], [note for _, note in calls]
        if any(first.differs(note) for note in notes):
            return calls
        if sizes and any(first.clashes(note) for note in notes) and any(note.inside for note in notes):
            return calls
    return []


def mismatched(made: Iterable[tuple[int, str, Note]]) -> Divergence | None:
    """Ranks that did different things as one collective, or brought other sizes to one that some have not come out of.

    Args:
        made: rank, line of the user's code, and note.
    """
    calls = differing((((rank, where), note) for rank, where, note in made), sizes=True)
    return parted([(rank, where, note) for (rank, where), note in calls]) if calls else None


def diverged(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Ranks that did different things as the same collective of one group."""
    calls = differing((snapshot, note) for snapshot in snapshots for note in snapshot.notes)
    if not calls:
        return None
    return parted([(each.rank, _location(each, note), note) for each, note in calls], traced(snapshots))


def _location(snapshot: RankSnapshot, note: Note) -> str:
    """Where a collective was called; autograd's own threads have no line of the user's, but who waits for them has."""
    waiting = (
        snapshot.stack.location(snapshot.stand.location)
        if note.inside and snapshot.stack is not None
        else snapshot.stand.location
    )
    return note.location or waiting


def parted(calls: Iterable[tuple[int, str, Note]], trace: str = "") -> Divergence:
    """What different ranks did as one collective.

    Args:
        calls: rank, line of the user's code, and note.
        trace: stacks of the ranks.
    """
    said = []
    for rank, location, note in sorted(calls, key=lambda call: call[0]):
        verb = "waits in" if note.inside else "called"
        payload = f" of {note.payload}" if note.payload else ""
        root = f" with rank {note.root}" if note.root >= 0 else ""
        phase = note.phase or (note.function if note.function != "<module>" else "")
        when = ", ".join(filter(None, [phase, f"batch {note.batch}" if note.batch >= 0 else ""]))
        said.append((rank, f"{verb} {note.named}{payload}{root}, {location}" + (f" ({when})" if when else "")))
    told = "; ".join(f"{named(ranks)} {what}" for what, ranks in odd_first(alike(said)))
    return Divergence(f"the ranks' calls do not match: {told}. {RULE}", trace)


def circle(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Ranks in collectives that need one another, each in another one.

    All ranks of a collective need the same others, so that it is enough to look at the collectives in which ranks are.
    """
    at: dict[Position, list[RankSnapshot]] = {}
    for snapshot in snapshots:
        inside = snapshot.inside
        if inside is not None:
            at.setdefault(position(inside), []).append(snapshot)
    if len(at) < 2:
        return None
    behind = {each: _behind(each, at) for each in at}
    needs = {each: set(found) for each, found in behind.items()}
    for each in at:
        around = {other for other in _reachable(each, needs) if each in _reachable(other, needs)}
        if not around:
            continue
        ranks = {rank for other in around for there in around for rank in behind[other].get(there, ())}
        around_them = told([snapshot for snapshot in snapshots if snapshot.rank in ranks])
        return Divergence(
            f"the ranks wait for one another in different collectives: {around_them}. {RULE}", traced(snapshots)
        )
    return None


def _has_not_come(snapshot: RankSnapshot, position: Position) -> bool:
    """Whether a rank's notes show that it was in collectives of the group, and not yet in this one.

    What is older than all that is known of a rank may have been there: nothing is said then.
    """
    group, names, number = position
    theirs = [note for note in snapshot.notes if note.group == group and note.members == names]
    numbers = [note.number for note in theirs if note.number]
    return bool(numbers) and max(numbers) < number and all(note.whole for note in theirs)


def _behind(position: Position, at: Mapping[Position, Sequence[RankSnapshot]]) -> dict[Position, set[int]]:
    """The ranks without which those of a collective cannot come out of it, and who are in others, by where they are."""
    inside = next(snapshot.inside for snapshot in at[position] if snapshot.inside is not None)
    if not inside.whole or inside.operation not in TOGETHER:
        return {}
    among = set(position[1])
    found: dict[Position, set[int]] = {}
    for other, there in at.items():
        for snapshot in there if other != position else ():
            if snapshot.rank in among and _has_not_come(snapshot, position):
                found.setdefault(other, set()).add(snapshot.rank)
    return found


def _reachable(position: Position, needs: Mapping[Position, set[Position]]) -> set[Position]:
    found: set[Position] = set()
    to_do = list(needs.get(position, ()))
    while to_do:
        each = to_do.pop()
        if each not in found:
            found.add(each)
            to_do += needs.get(each, ())
    return found


def stopped(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """A rank that somebody has stopped, for which others wait. A debugger's, that stops and goes on, is let be."""
    halted = [snapshot for snapshot in snapshots if snapshot.state == STOPPED and snapshot.stopped >= HALTED]
    waiting = [snapshot for snapshot in snapshots if snapshot.state in (RUNS, SLEEPS) and snapshot.waited >= HALTED / 2]
    if not halted or not waiting:
        return None
    return Divergence(f"{told(halted)} (SIGSTOP), and {told(waiting)}", traced(snapshots))


# -- no proofs


def outrun(snapshots: Sequence[RankSnapshot], limit: float) -> list[RankSnapshot]:
    """The same ranks, where those wait that have gone past a collective to which another rank has not come for so long.

    Calls return when they are queued on a device whose queue cannot be seen. Nobody is done with what all must come to.

    Args:
        snapshots: of all ranks that can be seen.
        limit: seconds.
    """
    least: dict[tuple[str, tuple[int, ...]], int] = {}
    for snapshot in snapshots:
        for key, number in _newest(snapshot).items():
            least[key] = min(number, least.get(key, number))

    def waits(note: Note, at: float) -> bool:
        known = note.done is not None and note.whole and note.number and not note.aside
        return bool(known) and note.operation in TOGETHER and at - note.entered >= limit + LAG

    found = []
    for snapshot in snapshots:
        at = snapshot.at
        notes = tuple(
            replace(note, done=None, queued=True)
            if note.number > least.get((note.group, note.members), note.number) and waits(note, at)
            else note
            for note in snapshot.notes
        )
        found.append(snapshot if notes == snapshot.notes else replace(snapshot, notes=notes))
    return found


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
    snapshots = outrun(snapshots, limit)
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
