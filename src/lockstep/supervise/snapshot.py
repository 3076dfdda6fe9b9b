"""Snapshots of ranks as seen from outside."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.supervise.causes import RankPosition
from lockstep.supervise.hang_text import GONE, SLEEPS, STOPPED
from lockstep.supervise.stack import Stack
from lockstep.supervise.trace_memory import LAG, Note


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
