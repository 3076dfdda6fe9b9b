"""Who diverges: what the ranks' traces, stacks and processes say together, once somebody waits. Pure functions.

Proofs end a run at once: two ranks did different things as the same collective of one group (`diverged`); ranks wait
for one another in a circle (`circle`); a rank has been stopped, and others wait for it (`stopped`). All else may come
right: a rank that is busy outside a collective keeps others waiting with good reason. It is told once (`overdue`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.supervise.causes import RULE, Divergence, Stand, alike, named, odd_first
from lockstep.supervise.stack import LOCKSTEP, TORCH, Frame, Stack
from lockstep.supervise.trace_memory import Note

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

    def plain(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> RankSnapshot:
        """The snapshot that `plain` was made of."""
        notes = tuple(Note(**{**note, "members": tuple(note["members"])}) for note in plain["notes"])
        stacks = {name: _stack(plain[name]) for name in ("stack", "worker")}
        return cls(**{**plain, "stand": Stand(**plain["stand"]), "notes": notes, **stacks})

    @property
    def inside(self) -> Note | None:
        """The collective that the thread that trains is in."""
        return next((note for note in self.notes if note.inside and not note.aside), None)

    @property
    def waited(self) -> float:
        """Seconds that it has waited for other ranks, as far as its notes tell, or its stack; 0: it does not."""
        inside = self.inside
        if inside is not None:
            return self.at - inside.entered
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
        inside, stack = self.inside, self.stack
        if self.state in (STOPPED, GONE):
            what = f"{self.state} in {inside.named}" if inside is not None else self.state
        elif inside is not None:
            doing = "" if stack is None else stack.doing
            what = f"waits in {inside.named}" + (f" ({doing})" if doing not in ("", inside.operation) else "")
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


def _when(snapshot: RankSnapshot) -> str:
    inside = snapshot.inside
    if inside is None:
        loads = (
            snapshot.stack is not None and snapshot.stack.loads
        )  # between two steps: the hook is that of the last one
        said = ["" if loads else snapshot.phase, f"since batch {snapshot.batch}" if snapshot.batch >= 0 else ""]
    else:
        said = [inside.phase or inside.function, f"batch {inside.batch}" if inside.batch >= 0 else ""]
    said = [words for words in said if words and words != "<module>"]
    return f" ({', '.join(said)})" if said else ""


def _stack(plain: Mapping[str, Any] | None) -> Stack | None:
    return None if plain is None else Stack(tuple(Frame(**frame) for frame in plain["frames"]))


# -- proofs


def compare(snapshots: Sequence[RankSnapshot]) -> Divergence | None:
    """Whether ranks wait, or will, for what cannot come.

    Args:
        snapshots: of all ranks that can be seen.
    """
    return diverged(snapshots) or circle(snapshots) or stopped(snapshots)


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
    """Ranks in collectives that need one another, each in another one."""
    needs = {snapshot.rank: _needed(snapshot, snapshots) for snapshot in snapshots}
    for snapshot in snapshots:
        if snapshot.rank in _reachable(snapshot.rank, needs):
            ranks = _reachable(snapshot.rank, needs)
            ours = [
                other for other in snapshots if other.rank in ranks and snapshot.rank in _reachable(other.rank, needs)
            ]
            told = _told(ours)
            return Divergence(
                f"the ranks wait for one another in different collectives: {told}. {RULE}", _trace(snapshots)
            )
    return None


def _needed(snapshot: RankSnapshot, snapshots: Sequence[RankSnapshot]) -> set[int]:
    """The ranks without which a rank cannot come out of where it is, and who have not come there."""
    inside = snapshot.inside
    if inside is None or not inside.whole or inside.operation not in TOGETHER:
        return set()
    found = set()
    for other in snapshots:
        if other.rank == snapshot.rank or other.rank not in inside.members or other.inside is None:
            continue
        theirs = [note for note in other.notes if (note.group, note.members) == (inside.group, inside.members)]
        numbers = [note.number for note in theirs if note.number]
        # what is older than all that is known of a rank may have been there: nothing is said then
        if numbers and max(numbers) < inside.number and all(note.whole for note in theirs):
            found.add(other.rank)
    return found


def _reachable(rank: int, needs: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    to_do = list(needs.get(rank, ()))
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
    return Divergence(f"{_told(halted)} (SIGSTOP), and {_told(waiting)}", _trace(snapshots))


# -- no proofs


def overdue(snapshots: Sequence[RankSnapshot], limit: float) -> Divergence | None:
    """That ranks have waited longer than so many seconds, and what the others do."""
    waiting = [snapshot for snapshot in snapshots if snapshot.waited >= limit]
    if not waiting:
        return None
    seconds = max(snapshot.waited for snapshot in waiting)
    others = [snapshot for snapshot in snapshots if snapshot not in waiting]
    told = "; ".join(filter(None, [_told(others), _told(waiting)]))
    return Divergence(f"for {seconds:.0f} s, {told}", _trace(snapshots))


def _told(snapshots: Iterable[RankSnapshot]) -> str:
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
