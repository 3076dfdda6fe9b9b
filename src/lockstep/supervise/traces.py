"""The traces of a node's ranks, read from outside: compared as they grow, and once more when a rank has ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lockstep.supervise.causes import Divergence, Stand
from lockstep.supervise.hang import Position, mismatched, position
from lockstep.supervise.trace_memory import Note, Reading

MOST = 256
"""Notes of a rank that are compared in one look; where more are made in a second, the older ones are not."""

RECENT = 16
"""Newest notes of a rank that tell what it does."""

KNOWN = 8192
"""Collectives that some ranks have made and others not yet, of which the first rank's note is kept."""

Made = tuple[list[int], str, Note]
"""Ranks that did the same, the line of the user's code, and the note."""


class Histories:
    """What ranks did as each collective of each group, compared as it comes in."""

    def __init__(self) -> None:
        self._open: dict[Position, dict[int, Note]] = {}

    def take(self, rank: int, notes: Iterable[Note], ranks: int) -> dict[int, Note]:
        """Take in notes of a rank.

        Args:
            rank: whose.
            notes: new ones, in order.
            ranks: how many ranks' notes are taken in here.

        Returns:
            by rank, the notes on the first collective as which ranks did different things; empty if there is none.
        """
        for note in notes:
            if not note.whole or not note.number or len(note.members) < 2:
                continue
            key = position(note)
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

    stand: Stand
    reading: Reading
    read: int = 0

    def new(self) -> list[Note]:
        """Notes that have not been compared."""
        count = self.reading.count
        first, self.read = max(self.read + 1, count - MOST + 1), count
        return self.reading.notes(first) if first <= count else []

    def where(self, note: Note) -> str:
        """The line of the user's code that made a collective."""
        return note.location or self.stand.location


class Traces:
    """Those of a node's ranks. Any thread may ask: what is open can be read whether the rank is there or not."""

    def __init__(self) -> None:
        self._traces: dict[int, _Trace] = {}
        self._histories = Histories()
        self._lock = threading.RLock()  # a reading takes in words as it goes

    def open(self, stands: Mapping[int, Stand]) -> None:
        """Open the traces of ranks, while their processes live."""
        with self._lock:
            for rank, stand in stands.items():
                known = self._traces.get(rank)
                if known is not None and known.stand.collectives == stand.collectives:
                    known.stand = stand
                elif stand.collectives:
                    with contextlib.suppress(OSError, ValueError):
                        self._traces[rank] = _Trace(stand, Reading(stand.collectives))

    def close(self) -> None:
        """Let go of them."""
        with self._lock:
            for trace in self._traces.values():
                trace.reading.close()
            self._traces.clear()

    @property
    def stands(self) -> dict[int, Stand]:
        """Where the ranks stand whose traces are open, by rank."""
        with self._lock:
            return {rank: trace.stand for rank, trace in sorted(self._traces.items())}

    # -- one rank

    def newest(self, rank: int, most: int = RECENT) -> tuple[Note, ...]:
        """The newest notes of a rank, the newest first."""
        with self._lock:
            trace = self._traces.get(rank)
            return () if trace is None else tuple(trace.reading.newest(most))

    def is_watched(self, rank: int) -> bool:
        """Whether it is noted which queued collectives the rank's device is done with."""
        with self._lock:
            trace = self._traces.get(rank)
            return trace is not None and trace.reading.is_watched

    def waits_since(self, rank: int) -> float | None:
        """When a rank entered the collective in which it is now; None where it is in none, or nobody knows."""
        newest = self.newest(rank, 1)
        return newest[0].entered if newest and newest[0].inside and not newest[0].aside else None

    # -- all of them

    def differing(self) -> dict[int, Note]:
        """By rank, the notes on the first new collective as which ranks did different things; empty if there is
        none."""
        with self._lock:
            for rank, trace in self._traces.items():
                found = self._histories.take(rank, trace.new(), len(self._traces))
                if found and all(self._is_so(rank, note) for rank, note in found.items()):
                    return found
        return {}

    def _is_so(self, rank: int, note: Note) -> bool:
        """Whether a second reading gives the same; a note that has been written over since counts as it was read."""
        for again in self._traces[rank].reading.notes(note.index):
            if again.index == note.index:
                return (again.operation, again.payload, again.number) == (note.operation, note.payload, note.number)
        return True

    def mismatch(self) -> Divergence | None:
        """What all notes prove that are there; it takes a while."""
        with self._lock:
            return mismatched(
                (rank, trace.where(note), note)
                for rank, trace in sorted(self._traces.items())
                for note in trace.reading.notes(1)
            )

    def made(self, positions: Collection[Position]) -> list[Made]:
        """What the ranks did as these collectives, those together that did the same."""
        found: dict[tuple[object, ...], Made] = {}
        with self._lock:
            for rank, trace in sorted(self._traces.items()):
                for note in trace.reading.newest(RECENT):
                    if position(note) in positions:
                        where = trace.where(note)
                        same = (position(note), note.operation, note.payload, note.root, note.inside, where)
                        found.setdefault(same, ([], where, note))[0].append(rank)
        return list(found.values())
