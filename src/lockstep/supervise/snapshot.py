"""Records of a rank's state: `RankPosition`, which the rank reports, and `RankSnapshot`, which supervisors observe."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.supervise.stack import Stack
from lockstep.supervise.trace_memory import LAG, Note

RUNS, SLEEPS, STOPPED, TRACED, GONE = "runs", "sleeps", "is stopped", "is traced", "is gone"
"""States of a process, as they are printed."""


@dataclass(frozen=True)
class RankPosition:
    """A rank's report about its newest Trainer call, and whether the rank is still inside the call."""

    rank: int
    at: float  #: when it got there, on the clock of ``time.monotonic``
    call: int  #: which call, counted from 1
    inside: bool  #: whether the rank is inside the call; False: the call has returned or raised
    location: str  #: the line of the user's code that called
    process: int = 0  #: id of the rank's process
    answers: str = ""  #: address at which the rank answers requests for its stack
    ended: bool = False  #: whether its process has ended
    collectives: str = ""  #: path of its trace of collectives
    hang_timeout: float | None = None  #: seconds of waiting until the wait is reported; None: never
    hang_kill: float | None = None  #: seconds of waiting until the run is ended; None: never


@dataclass(frozen=True)
class RankSnapshot:
    """The state of one rank at one moment, as its supervisor sees it."""

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
        """Collective whose call by the training thread has not returned; None if there is none."""
        # a plain loop for speed: it runs each second for thousands of ranks
        for note in self.notes:
            if note.left is None and not note.aside:
                return note
        return None

    @property
    def queued(self) -> Note | None:
        """Oldest collective whose call has returned but that the device has not completed; None if there is none.

        The call has returned. The rank may have continued until it needed a value that depends on the collective.
        """
        found = None
        for note in self.notes:
            if note.queued and note.left is not None:
                found = note
        return found

    @property
    def awaited(self) -> Note | None:
        """The collective in which the rank's thread or device waits for other ranks; None if the rank does not wait."""
        return self.inside or self.queued

    @property
    def waited(self) -> float:
        """Seconds for which the rank has waited for others, according to its trace or stack; 0 if it does not wait."""
        inside = self.inside
        if inside is not None:
            return self.at - inside.entered
        queued = self.queued
        if queued is not None:
            return max(0.0, self.at - queued.entered - LAG)
        return self.still if self.stack is not None and self.stack.waits else 0.0

    @property
    def location(self) -> str:
        """Current line of the user's code; the loader worker's line if the rank waits for a loader worker."""
        if self.worker is not None:
            return self.worker.location()
        noted = self.inside
        if noted is None and self.stack is None and self.state in (STOPPED, GONE):
            noted = next(iter(self.notes), None)
        if noted is not None and noted.location:
            return noted.location
        return self.position.location if self.stack is None else self.stack.location(self.position.location)
