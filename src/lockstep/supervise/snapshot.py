"""What is seen of a rank from outside at one moment, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.supervise.causes import Stand, alike, named
from lockstep.supervise.stack import LOCKSTEP, TORCH, Stack
from lockstep.supervise.trace_memory import LAG, Note

_BESIDE = (f"{LOCKSTEP}launch/", f"{TORCH}distributed/c10d_logger.py")
RUNS, SLEEPS, STOPPED, TRACED, GONE = "runs", "sleeps", "is stopped", "is traced", "is gone"
"""States of a process."""

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


# -- several ranks


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


def traced(snapshots: Iterable[RankSnapshot]) -> str:
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
