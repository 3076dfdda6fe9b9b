"""Traces of a node's ranks (records of their newest collectives), which the supervisor reads and compares."""

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
"""Number of a rank's newest notes that are read to describe its activity."""

KNOWN = 8192
"""Maximum number of remembered collectives that only some ranks have called."""

RankCalls = tuple[list[int], str, Note]
"""Ranks with equal calls, the line of the user's code, and the note of one of the calls."""


class Histories:
    """Incremental comparison of the ranks' notes. Each note records one collective."""

    def __init__(self) -> None:
        self._open: dict[CollectiveKey, dict[int, Note]] = {}

    def add(self, rank: int, notes: Iterable[Note], ranks: int) -> dict[int, Note]:
        """Add new notes of a rank, and compare each with the other ranks' notes of the same collective.

        Args:
            rank: the rank.
            notes: new notes, in order.
            ranks: number of ranks whose notes are added here.

        Returns:
            all ranks' notes of the first collective in which their calls do not match, by rank; empty if all match.
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
    """Trace of one rank, with the rank's position and the index of the newest note that has been compared.

    Attributes:
        read: the number of the newest note that has been compared.
    """

    position: RankPosition
    reading: Reading
    read: int = 0

    def new(self) -> list[Note]:
        """Return the notes that have not been compared yet, and mark them as compared."""
        count = self.reading.count
        first, self.read = max(self.read + 1, count - MOST + 1), count
        return self.reading.notes(first) if first <= count else []

    def where(self, note: Note) -> str:
        """Return the line of the user's code that called a collective.

        If lockstep called it, return the line of the Trainer call.
        """
        return note.location or self.position.location


class Traces:
    """The traces of a node's ranks. Open traces remain readable after their ranks have ended. Thread-safe."""

    def __init__(self) -> None:
        self._traces: dict[int, _Trace] = {}
        self._histories = Histories()
        self._lock = threading.RLock()  # reading changes the cached words

    def open(self, positions: Mapping[int, RankPosition]) -> None:
        """Open the traces of ranks whose processes still run."""
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
        """Dict from each rank with an open trace to its `RankPosition`."""
        with self._lock:
            return {rank: trace.position for rank, trace in sorted(self._traces.items())}

    # -- one rank

    def newest(self, rank: int, most: int = RECENT) -> tuple[Note, ...]:
        """Return the notes of a rank's newest collectives, the newest first."""
        with self._lock:
            trace = self._traces.get(rank)
            return () if trace is None else tuple(trace.reading.newest(most))

    def is_watched(self, rank: int) -> bool:
        """Return True if the rank currently records which of the queued collectives its device has completed."""
        with self._lock:
            trace = self._traces.get(rank)
            return trace is not None and trace.reading.is_watched

    def waits_since(self, rank: int) -> float | None:
        """Return the time at which a rank entered its current collective; None outside a collective, or if unknown."""
        newest = self.newest(rank, 1)
        return newest[0].entered if newest and newest[0].inside and not newest[0].aside else None

    # -- all ranks

    def differing(self) -> dict[int, Note]:
        """Return {rank: note} of the first new collective in which the ranks' calls do not match; {} if all match."""
        with self._lock:
            for rank, trace in self._traces.items():
                found = self._histories.add(rank, trace.new(), len(self._traces))
                if found and all(self._is_confirmed(rank, note) for rank, note in found.items()):
                    return found
        return {}

    def _is_confirmed(self, rank: int, note: Note) -> bool:
        """Read a note again. Return True if it is unchanged, or if the rank has overwritten it with a newer note."""
        # the rank may have been writing the note during the first reading, and a proof ends the run
        for again in self._traces[rank].reading.notes(note.index):
            if again.index == note.index:
                return (again.operation, again.payload, again.number) == (note.operation, note.payload, note.number)
        return True

    def mismatch(self) -> Divergence | None:
        """Describe the first collective, in all available notes, in which the ranks' calls do not match.

        Return None if all match. The comparison is slow.
        """
        with self._lock:
            return mismatched(
                (rank, trace.where(note), note)
                for rank, trace in sorted(self._traces.items())
                for note in trace.reading.notes(1)
            )

    def made(self, keys: Collection[CollectiveKey]) -> list[RankCalls]:
        """Return all ranks' calls of the collectives with these ``keys``. Ranks with equal calls are grouped."""
        found: dict[tuple[object, ...], RankCalls] = {}
        with self._lock:
            for rank, trace in sorted(self._traces.items()):
                for note in trace.reading.newest(RECENT):
                    if key_of(note) in keys:
                        where = trace.where(note)
                        same = (key_of(note), note.operation, note.payload, note.root, note.inside, where)
                        found.setdefault(same, ([], where, note))[0].append(rank)
        return list(found.values())
