"""Snapshots of ranks as seen from outside, and their description."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.supervise.causes import RankPosition, alike, named
from lockstep.supervise.stack import LOCKSTEP, TORCH, Stack
from lockstep.supervise.trace_memory import LAG, Note

_BESIDE = (f"{LOCKSTEP}launch/", f"{TORCH}distributed/c10d_logger.py")
RUNS, SLEEPS, STOPPED, TRACED, GONE = "runs", "sleeps", "is stopped", "is traced", "is gone"
"""States of a process."""

SHORT = 6
"""Maximum number of printed frames of a stack."""
STACKS = 3
"""Maximum number of different stacks that are printed."""


@dataclass(frozen=True)
class RankSnapshot:
    """The state of one rank at one moment, as seen from outside."""

    rank: int
    at: float  #: the moment, on the clock of its host's ``time.monotonic``
    position: RankPosition
    state: str = SLEEPS
    still: float = 0.0  #: seconds without processor time
    stopped: float = 0.0  #: seconds since it was stopped
    notes: tuple[Note, ...] = ()  #: newest notes of its trace, the newest first
    stack: Stack | None = None
    worker: Stack | None = None  #: stack of the loader worker that the rank waits for
    held: float = 0.0  #: seconds since its stack was first seen waiting for others, without interruption

    @property
    def inside(self) -> Note | None:
        """The collective that the training thread is in; None if it is in none."""
        for note in self.notes:  # a plain loop for speed: it runs each second for thousands of ranks
            if note.left is None and not note.aside:
                return note
        return None

    @property
    def queued(self) -> Note | None:
        """The oldest collective that its device has not completed; None if there is none.

        The call has returned. The rank may have continued until it needed a value that depends on the collective.
        """
        found = None
        for note in self.notes:
            if note.queued and note.left is not None:
                found = note
        return found

    @property
    def awaited(self) -> Note | None:
        """The collective in which its thread or its device waits for others."""
        return self.inside or self.queued

    @property
    def waited(self) -> float:
        """Seconds that it has waited for other ranks, by its notes or its stack; 0 if it does not wait."""
        inside = self.inside
        if inside is not None:
            return self.at - inside.entered
        queued = self.queued
        if queued is not None:
            return max(0.0, self.at - queued.entered - LAG)
        return self.still if self.stack is not None and self.stack.waits else 0.0

    @property
    def location(self) -> str:
        """The current line of the user's code; the worker's line if the rank waits for a loader worker."""
        if self.worker is not None:
            return self.worker.location()
        noted = self.inside
        if noted is None and self.stack is None and self.state in (STOPPED, GONE):
            noted = next(iter(self.notes), None)
        if noted is not None and noted.location:
            return noted.location
        return self.position.location if self.stack is None else self.stack.location(self.position.location)

    def described(self) -> str:
        """Return the rank's activity and line: ``"waits in all_reduce #417, train.py:88 (on_train_epoch_end)"``."""
        when = _since(self.stack) if self.awaited is None else when_of(self.awaited)
        return f"{self._doing()}, {self.location}{when}"

    def _doing(self) -> str:
        inside, queued, stack = self.inside, self.queued, self.stack
        doing = "" if stack is None else stack.doing
        if self.state in (STOPPED, GONE):
            return self.state if inside is None else f"{self.state} in {inside.named}"
        if inside is not None:
            return f"waits in {inside.named}" + (f" ({doing})" if doing not in ("", inside.operation) else "")
        if queued is not None:
            return f"waits in {queued.named} (queued on its device)"
        if stack is None:
            return self.state
        if stack.loads:
            return "is in its data loader"
        if stack.waits:
            return f"waits in {self._begun(doing) or doing or 'a collective'}"
        return f"is in {doing or 'its own code'}"

    def _begun(self, doing: str) -> str:
        """Return the oldest asynchronous collective not known to be complete, if the rank waits for one."""
        begun = [note for note in self.notes if note.left is not None and note.done is None and not note.aside]
        return begun[-1].named if begun and doing == "wait" else ""


def when_of(note: Note) -> str:
    """Return the hook and the batch of a collective: ``" (on_validation_epoch_end, batch 7)"``."""
    function = "" if note.function == "<module>" else note.function
    return _in_brackets(note.phase or function, f"batch {note.batch}" if note.batch >= 0 else "")


def _since(stack: Stack | None) -> str:
    """Return the hook that a rank is in, and since which batch, if it reported them."""
    if stack is None:
        return ""
    phase = "" if stack.loads else stack.phase  # while loading, the hook is that of the last step
    return _in_brackets(phase, f"since batch {stack.batch}" if stack.batch >= 0 else "")


def _in_brackets(*words: str) -> str:
    said = ", ".join(filter(None, words))
    return f" ({said})" if said else ""


# -- several ranks


def told(snapshots: Iterable[RankSnapshot]) -> str:
    """Describe what ranks do. Ranks that do the same are grouped."""
    groups = alike(
        (snapshot.rank, snapshot.described()) for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.rank)
    )
    return "; ".join(f"{named(ranks)} {_plural(what) if len(ranks) > 1 else what}" for what, ranks in groups)


def _plural(what: str) -> str:
    verb, _, rest = what.partition(" ")
    plural = {"is": "are", "waits": "wait", "runs": "run", "sleeps": "sleep"}.get(verb.rstrip(","), verb.rstrip(","))
    return f"{plural}{',' if verb.endswith(',') else ''} {rest}".replace(" its ", " their ", 1)


def traced(snapshots: Iterable[RankSnapshot]) -> str:
    """Return the ranks' Python stacks, each in a few lines. Equal stacks appear once."""
    groups = alike(
        (snapshot.rank, f"{whose}:\n{brief(stack)}")
        for snapshot in snapshots
        for stack, whose in ((snapshot.stack, ""), (snapshot.worker, ", a worker of its data loader"))
        if stack is not None
    )
    shown = sorted(groups, key=lambda group: (len(group[1]), group[1]))[:STACKS]
    return "\n".join(f"{named(ranks)}{text}" for text, ranks in shown)


def brief(stack: Stack, most: int = SHORT) -> str:
    """Return a stack in a few lines, the innermost call last: the user's lines, and the innermost others."""
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
