"""Who diverges: what the ranks' traces, stacks and processes say together, once somebody waits. Pure functions.

Proofs end a run at once: two ranks did different things as the same collective of one group (`diverged`); ranks wait
for one another in a circle (`circle`); a rank has been stopped, and others wait for it (`stopped`). All else may come
right: a rank that is busy outside a collective keeps others waiting with good reason. It is told once (`overdue`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from lockstep.supervise.causes import RULE, Divergence, Stand, alike, named, odd_first
from lockstep.supervise.stack import LOCKSTEP, TORCH, Frame, Stack
from lockstep.supervise.trace_memory import LAG, Members, Note, shared

_BESIDE = (f"{LOCKSTEP}launch/", f"{TORCH}distributed/c10d_logger.py")
RUNS, SLEEPS, STOPPED, TRACED, GONE = "runs", "sleeps", "is stopped", "is traced", "is gone"
"""States of a process."""

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

SHORT = 6
"""Frames of a stack that are told."""
STACKS = 3
"""Different stacks that are told."""


@dataclass(frozen=True)
class RankSnapshot:
    """What is seen of one rank from outside, at one moment."""

    rank: int
    at: float  #: the moment, on the clock of its host's ``time.monotonic``
    stand: Stand
    state: str = SLEEPS
    still: float = 0.0  #: seconds without any work of the processor
    stopped: float = 0.0  #: seconds since it was stopped
    notes: tuple[Note, ...] = ()  #: the newest of its trace, the newest first
    stack: Stack | None = None
    worker: Stack | None = None  #: of a loader's worker, where the rank waits for it
    phase: str = ""  #: the hook in which it is, if it said so
    batch: int = -1  #: the training batch at which it is, if it said so
    held: float = 0.0  #: seconds since its stack was first seen to wait for others, if nothing has come in between

    @property
    def inside(self) -> Note | None:
        """The collective that the thread that trains is in."""
        for note in self.notes:  # a plain loop: of thousands of ranks this is asked each second
            if note.left is None and not note.aside:
                return note
        return None

    @property
    def queued(self) -> Note | None:
        """The oldest collective that its device is not done with. The call has returned, and the rank may have gone on
        until it asked for a value that lies behind."""
        found = None
        for note in self.notes:
            if note.queued and note.left is not None:
                found = note
        return found

    @property
    def awaited(self) -> Note | None:
        """The collective in which it waits for others: its thread, or its device."""
        return self.inside or self.queued

    @property
    def waited(self) -> float:
        """Seconds that it has waited for other ranks, as far as its notes tell, or its stack; 0: it does not."""
        inside = self.inside
        if inside is not None:
            return self.at - inside.entered
        queued = self.queued
        if queued is not None:
            return max(0.0, self.at - queued.entered - LAG)
        return self.still if self.stack is not None and self.stack.waits else 0.0

    @property
    def location(self) -> str:
        """The line of the user's code at which it is; the innermost of the loader's worker where it waits for that."""
        if self.worker is not None:
            return self.worker.location()
        inside = self.inside
        if self.stack is not None and (inside is None or not inside.location):
            return self.stack.location(self.stand.location)
        noted = inside or (self.notes[0] if self.notes and self.state in (STOPPED, GONE) else None)
        return (noted.location if noted is not None else "") or self.stand.location

    def described(self) -> str:
        """What it does, and where: ``"waits in all_reduce #417, train.py:88 (on_validation_epoch_end)"``."""
        inside, stack, queued = self.inside, self.stack, self.queued
        if self.state in (STOPPED, GONE):
            what = f"{self.state} in {inside.named}" if inside is not None else self.state
        elif inside is None and queued is not None:
            what = f"waits in {queued.named} (queued on its device)"
        elif inside is not None:
            what = f"waits in {_shown_with(inside, stack)}"
        elif stack is None:
            what = self.state
        elif stack.loads:
            what = "is in its data loader"
        elif stack.waits:
            what = f"waits in {_outstanding(self) or stack.doing or 'a collective'}"
        else:
            what = f"is in {stack.doing}" if stack.doing else "is in its own code"
        return f"{what}, {self.location}{_when(self)}"


def _outstanding(snapshot: RankSnapshot) -> str:
    """The oldest asynchronous collective that is not known to be complete."""
    open_ = [note for note in snapshot.notes if note.left is not None and note.done is None and not note.aside]
    return open_[-1].named if open_ and snapshot.stack is not None and snapshot.stack.doing == "wait" else ""


def _shown_with(inside: Note, stack: Stack | None) -> str:
    """A collective, with what the stack says beside its name."""
    doing = "" if stack is None else stack.doing
    return inside.named + (f" ({doing})" if doing not in ("", inside.operation) else "")


def _when(snapshot: RankSnapshot) -> str:
    inside = snapshot.awaited
    if inside is None:
        loads = (
            snapshot.stack is not None and snapshot.stack.loads
        )  # between two steps: the hook is that of the last one
        said = ["" if loads else snapshot.phase, f"since batch {snapshot.batch}" if snapshot.batch >= 0 else ""]
    else:
        said = [inside.phase or inside.function, f"batch {inside.batch}" if inside.batch >= 0 else ""]
    said = [words for words in said if words and words != "<module>"]
    return f" ({', '.join(said)})" if said else ""


# -- between nodes


CLOCKS = ("at", "still", "stopped", "held")
"""What of a snapshot goes on by itself."""

TOLERANCE = 0.5
"""Seconds by which those may differ from what is expected of them before they are told again."""


def later(snapshot: RankSnapshot, at: float) -> RankSnapshot:
    """A rank that goes on doing what it does, at a later moment."""
    more = at - snapshot.at
    on = {name: value + more for name in CLOCKS[1:] if (value := getattr(snapshot, name))}
    return replace(snapshot, at=at, **on)


class Changes:
    """What the next message on some ranks has to tell whoever has taken in all before it (`taken_in`)."""

    def __init__(self) -> None:
        self._known: dict[int, RankSnapshot] = {}  # as they were last told
        self._next: dict[int, RankSnapshot] = {}

    def of(self, snapshots: Sequence[RankSnapshot], at: float) -> dict[str, Any]:
        """The message, as JSON knows it: the ranks that have changed, with what has, and those that are no more.

        Args:
            snapshots: as they are now. A stack stays until there is another.
            at: the moment.
        """
        told = []
        self._next = {}
        for now in snapshots:
            before = self._known.get(now.rank)
            change = self._change(before, now)
            known = now if before is None else replace(now, stack=now.stack or before.stack)
            self._next[now.rank] = known if change or before is None else before
            if change:
                told.append({"rank": now.rank, **change})
        return {"at": at, "ranks": told, "gone": sorted(self._known.keys() - self._next.keys())}

    def keep(self) -> None:
        """The last message has been sent."""
        self._known = self._next

    @staticmethod
    def _change(before: RankSnapshot | None, now: RankSnapshot) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for field in fields(RankSnapshot):
            name, value = field.name, getattr(now, field.name)
            if name in ("rank", *CLOCKS) or (before is not None and value == getattr(before, name)):
                continue
            if name == "stack" and value is None:
                continue
            told[name] = _plain(name, value)
        expected = None if before is None else later(before, now.at)
        if not told and expected is not None:
            strays = any(abs(getattr(now, name) - getattr(expected, name)) > TOLERANCE for name in CLOCKS)
            if not strays:
                return {}
        return {**told, **{name: getattr(now, name) for name in CLOCKS}}


def taken_in(before: Mapping[int, RankSnapshot], told: Mapping[str, Any]) -> dict[int, RankSnapshot]:
    """The ranks of a node after a message of `Changes`, by rank.

    Args:
        before: as they were known.
        told: the message.
    """
    gone = set(told["gone"])
    found = {rank: later(known, told["at"]) for rank, known in before.items() if rank not in gone}
    for each in told["ranks"]:
        values = {name: _value(name, value) for name, value in each.items()}
        known = before.get(each["rank"])
        found[each["rank"]] = RankSnapshot(**values) if known is None else replace(known, **values)
    return found


_OF_A_NOTE = tuple(field.name for field in fields(Note))


def plain_notes(notes: Iterable[Note]) -> list[dict[str, Any]]:
    """Notes as JSON knows them."""
    return [
        {name: getattr(note, name) for name in _OF_A_NOTE} | {"members": ranges(shared(note.members))} for note in notes
    ]


def notes_of(plain: Iterable[dict[str, Any]]) -> tuple[Note, ...]:
    """The notes of which `plain_notes` made these."""
    return tuple(Note(**{**note, "members": members(tuple(map(tuple, note["members"])))}) for note in plain)


def _plain(name: str, value: Any) -> Any:
    if name == "notes":
        return plain_notes(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _value(name: str, plain: Any) -> Any:
    if name == "notes":
        return notes_of(plain)
    if name == "stand":
        return Stand(**plain)
    if name in ("stack", "worker"):
        return None if plain is None else Stack(tuple(Frame(**frame) for frame in plain["frames"]))
    return plain


@functools.lru_cache(maxsize=4096)
def ranges(ranks: tuple[int, ...]) -> list[list[int]]:
    """Numbers as runs of equal steps, ``[[first, last, step], ...]``: a group of thousands of ranks is one or few."""
    found: list[list[int]] = []
    for rank in ranks:
        run = found[-1] if found else None
        if run is not None and run[0] == run[1] and rank > run[1]:
            run[1], run[2] = rank, rank - run[0]
        elif run is not None and rank == run[1] + run[2] and run[0] != run[1]:
            run[1] = rank
        else:
            found.append([rank, rank, 1])
    return found


@functools.lru_cache(maxsize=4096)
def members(runs: tuple[tuple[int, int, int], ...]) -> Members:
    """The numbers of which `ranges` made these."""
    return shared(tuple(rank for first, last, step in runs for rank in range(first, last + 1, step)))


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


def mismatched(made: Iterable[tuple[int, str, Note]]) -> Divergence | None:
    """Ranks that did different things as one collective, or brought other sizes to one that some have not come out of.

    Args:
        made: rank, line of the user's code, and note.
    """
    found: dict[Position, list[tuple[int, str, Note]]] = {}
    for each in made:
        if each[2].whole and each[2].number:
            found.setdefault(position(each[2]), []).append(each)
    for _, calls in sorted(found.items(), key=lambda item: item[0][2]):
        first, notes = calls[0][2], [note for *_, note in calls]
        clashes = any(first.clashes(note) for note in notes) and any(note.inside for note in notes)
        if clashes or any(first.differs(note) for note in notes):
            return parted(calls)
    return None


def diverged(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Ranks that did different things as the same collective of one group."""
    made: dict[tuple[str, tuple[int, ...], int], list[tuple[RankSnapshot, Note]]] = {}
    for snapshot in snapshots:
        for note in snapshot.notes:
            if note.whole and note.number:
                made.setdefault((note.group, note.members, note.number), []).append((snapshot, note))
    for _, notes in sorted(made.items(), key=lambda item: item[0][2]):
        first = notes[0][1]
        if any(first.differs(note) for _, note in notes):
            return parted(
                [(snapshot.rank, _location(snapshot, note), note) for snapshot, note in notes], _trace(snapshots)
            )
    return None


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
            at.setdefault((inside.group, inside.members, inside.number), []).append(snapshot)
    if len(at) < 2:
        return None
    behind = {position: _behind(position, at) for position in at}
    needs = {position: set(found) for position, found in behind.items()}
    for position in at:
        around = {other for other in _reachable(position, needs) if position in _reachable(other, needs)}
        if not around:
            continue
        ranks = {rank for other in around for there in around for rank in behind[other].get(there, ())}
        around_them = told([snapshot for snapshot in snapshots if snapshot.rank in ranks])
        return Divergence(
            f"the ranks wait for one another in different collectives: {around_them}. {RULE}", _trace(snapshots)
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
    return Divergence(f"{told(halted)} (SIGSTOP), and {told(waiting)}", _trace(snapshots))


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
    return Divergence(f"for {seconds:.0f} s, {said}", _trace(snapshots))


def told(snapshots: Iterable[RankSnapshot]) -> str:
    """What ranks do, those that do the same together."""
    groups = alike(
        (snapshot.rank, snapshot.described()) for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.rank)
    )
    return "; ".join(f"{named(ranks)} {_plural(what) if len(ranks) > 1 else what}" for what, ranks in groups)


def _plural(what: str) -> str:
    verb, _, rest = what.partition(" ")
    plural = {"is": "are", "waits": "wait", "runs": "run", "sleeps": "sleep"}.get(verb.rstrip(","), verb.rstrip(","))
    return f"{plural}{',' if verb.endswith(',') else ''} {rest}".replace(" its ", " their ", 1)


def _trace(snapshots: Iterable[RankSnapshot]) -> str:
    """The ranks' Python stacks, each in a few lines, those alike once."""
    groups = alike(
        (snapshot.rank, f"{whose}:\n{brief(stack)}")
        for snapshot in snapshots
        for stack, whose in ((snapshot.stack, ""), (snapshot.worker, ", a worker of its data loader"))
        if stack is not None
    )
    shown = sorted(groups, key=lambda group: (len(group[1]), group[1]))[:STACKS]
    return "\n".join(f"{named(ranks)}{text}" for text, ranks in shown)


def brief(stack: Stack, most: int = SHORT) -> str:
    """A stack in a few lines, the innermost call last: the user's lines, and the innermost of the others."""
    frames = [frame for frame in stack.frames if not frame.file.startswith(_BESIDE)]
    users = [index for index, frame in enumerate(frames) if frame.is_users][: most - 2]
    kept = sorted({*range(min(2, len(frames))), *users})
    kept = sorted({*kept, *[index for index in range(len(frames)) if index not in kept][: max(0, most - len(kept))]})
    lines = []
    for index in reversed(kept):
        frame = frames[index]
        file = frame.file.replace(LOCKSTEP, "lockstep/").replace(TORCH, "torch/")
        lines.append(f"    {file}:{frame.line} in {frame.function}")
    return "\n".join(lines)
