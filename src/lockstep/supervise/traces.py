"""Traces of a node's ranks, read from outside. They are compared as they grow, and once more after a rank has ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lockstep.supervise.causes import Divergence
from lockstep.supervise.hang import CollectiveKey, key_of, mismatched
from lockstep.supervise.snapshot import RankPosition
from lockstep.supervise.trace_memory import Note, Reading

MOST = 256
"""Maximum number of a rank's notes compared in one check. Older ones are skipped."""

RECENT = 16
"""Number of a rank's newest notes that describe what it does."""

KNOWN = 8192
"""Maximum number of collectives kept that some ranks have made and others have not."""

RankCalls = tuple[list[int], str, Note]
"""Ranks that did the same, the line of the user's code, and the note."""


class Histories:
    """History of each collective of each group, compared among ranks as notes arrive."""

    def __init__(self) -> None:
        self._open: dict[CollectiveKey, dict[int, Note]] = {}

    def take(self, rank: int, notes: Iterable[Note], ranks: int) -> dict[int, Note]:
        """Add notes of a rank.

        Args:
            rank: the rank.
            notes: new notes, in order.
            ranks: number of ranks whose notes are added here.

        Returns:
            notes by rank of the first collective in which ranks did different things; empty without one.
        """
        for note in notes:
            if not note.whole or not note.number or len(note.members) < 2:
                continue
            key = key_of(note)
            made = self._open.setdefault(key, {})
            if any(note.differs(other) for other in made.values()):
                return {**made, rank: note}
            made[rank] = note
            if len(made) >= min(ranks, len(note.members)):
                del self._open[key]
        while len(self._open) > KNOWN:
            del self._open[next(iter(self._open))]
        return {}


@dataclass
class _Trace:
    """The trace of one rank.

    Attributes:
        read: the number of the newest note that has been compared.
    """

    position: RankPosition
    reading: Reading
    read: int = 0

    def new(self) -> list[Note]:
        """Return the notes that have not been compared."""
        count = self.reading.count
        first, self.read = max(self.read + 1, count - MOST + 1), count
        return self.reading.notes(first) if first <= count else []

    def where(self, note: Note) -> str:
        """Return the line of the user's code that made a collective."""
        return note.location or self.position.location


class Traces:
    """The traces of a node's ranks. Open traces remain readable after their ranks have ended. Thread-safe."""

    def __init__(self) -> None:
        self._traces: dict[int, _Trace] = {}
        self._histories = Histories()
        self._lock = threading.RLock()  # reading changes the cached words

    def open(self, positions: Mapping[int, RankPosition]) -> None:
        """Open the traces of ranks while their processes live."""
        with self._lock:
            for rank, position in positions.items():
                known = self._traces.get(rank)
                if known is not None and known.position.collectives == position.collectives:
                    known.position = position
                elif position.collectives:
                    with contextlib.suppress(OSError, ValueError):
                        self._traces[rank] = _Trace(position, Reading(position.collectives))

    def close(self) -> None:
        """Close all traces."""
        with self._lock:
            for trace in self._traces.values():
                trace.reading.close()
            self._traces.clear()

    @property
    def positions(self) -> dict[int, RankPosition]:
        """Positions of the ranks with open traces, by rank."""
        with self._lock:
            return {rank: trace.position for rank, trace in sorted(self._traces.items())}

    # -- one rank

    def newest(self, rank: int, most: int = RECENT) -> tuple[Note, ...]:
        """Return the newest notes of a rank, the newest first."""
        with self._lock:
            trace = self._traces.get(rank)
            return () if trace is None else tuple(trace.reading.newest(most))

    def is_watched(self, rank: int) -> bool:
        """Return True if completed collectives in the queue of the rank's device are currently recorded."""
        with self._lock:
            trace = self._traces.get(rank)
            return trace is not None and trace.reading.is_watched

    def waits_since(self, rank: int) -> float | None:
        """Return when a rank entered the collective that it is in. None if it is in none, or unknown."""
        newest = self.newest(rank, 1)
        return newest[0].entered if newest and newest[0].inside and not newest[0].aside else None

    # -- all ranks

    def differing(self) -> dict[int, Note]:
        """Return the notes, by rank, of the first new collective in which ranks did different things, if any."""
        with self._lock:
            for rank, trace in self._traces.items():
                found = self._histories.take(rank, trace.new(), len(self._traces))
                if found and all(self._is_confirmed(rank, note) for rank, note in found.items()):
                    return found
        return {}

    def _is_confirmed(self, rank: int, note: Note) -> bool:
        """Return True if a second reading gives the same. An overwritten note counts as first read."""
        # the rank may have been writing the note during the first reading, and a proof ends the run
        for again in self._traces[rank].reading.notes(note.index):
            if again.index == note.index:
                return (again.operation, again.payload, again.number) == (note.operation, note.payload, note.number)
        return True

    def mismatch(self) -> Divergence | None:
        """Return the mismatch in all available notes, if any. Slow."""
        with self._lock:
            return mismatched(
                (rank, trace.where(note), note)
                for rank, trace in sorted(self._traces.items())
                for note in trace.reading.notes(1)
            )

    def made(self, keys: Collection[CollectiveKey]) -> list[RankCalls]:
        """Return what the ranks did in these collectives. Ranks that did the same are grouped."""
        found: dict[tuple[object, ...], RankCalls] = {}
        with self._lock:
            for rank, trace in sorted(self._traces.items()):
                for note in trace.reading.newest(RECENT):
                    if key_of(note) in keys:
                        where = trace.where(note)
                        same = (key_of(note), note.operation, note.payload, note.root, note.inside, where)
                        found.setdefault(same, ([], where, note))[0].append(rank)
        return list(found.values())
