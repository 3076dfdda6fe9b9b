"""The lookout for hangs: what the ranks' ledgers, stacks and processes show from one second to the next."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from lockstep.launch.causes import Stand, Stray
from lockstep.launch.children import stat_of
from lockstep.launch.hang import GONE, HALTED, RUNS, SLEEPS, STOPPED, TRACED, Sight, compare, diverged, overdue, parted
from lockstep.launch.ledger import Note, Reading
from lockstep.launch.sample import ask, ask_stopped, ask_workers, speak
from lockstep.launch.stack import one_line

MOST = 256
"""Notes of a rank that are compared in one look; where more are made in a second, the older ones are not."""
KNOWN = 8192
"""Collectives that some ranks have made and others not yet, of which the first rank's note is kept."""
ANSWER = 0.03
"""Seconds in which a rank that can says at which batch it is."""
PATIENCE = 5.0
"""Seconds for which what was heard from another node counts."""
SHOWN = 10.0
"""Seconds from one time to the next at which ranks are asked for their stacks since another node wants to know."""
STATES = {"T": STOPPED, "t": TRACED, "Z": GONE, "X": GONE, "R": RUNS, "D": RUNS}


class Channel(Protocol):
    """The way to the supervisors of other nodes."""

    def send(self, topic: str, body: Any) -> None:
        """To all others."""
        ...

    def listen(self, topic: str, callback: Any) -> None:
        """``callback(node, body)`` for what comes from others."""
        ...


class Histories:
    """What ranks did as each collective of each group, compared as it comes in."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, tuple[int, ...], int], dict[int, Note]] = {}

    def take(self, rank: int, notes: Iterable[Note], ranks: int) -> dict[int, Note] | None:
        """Take in notes of a rank.

        Args:
            rank: whose.
            notes: new ones, in order.
            ranks: how many ranks' notes are taken in here.

        Returns:
            by rank, the notes on the first collective as which ranks did different things.
        """
        for note in notes:
            if not note.whole or not note.number or len(note.members) < 2:
                continue
            key = note.group, note.members, note.number
            made = self._open.setdefault(key, {})
            if any(note.differs(other) for other in made.values()):
                return {**made, rank: note}
            made[rank] = note
            if len(made) >= min(ranks, len(note.members)):
                del self._open[key]
        while len(self._open) > KNOWN:
            del self._open[next(iter(self._open))]
        return None


class Lookout:
    """Looks at the ranks of a node, and hears of those of others.

    Args:
        channel: to the other nodes; None: there are none, or no way to them.
    """

    def __init__(self, channel: Channel | None = None) -> None:
        self._readings: dict[int, tuple[str, Reading]] = {}
        self._stands: dict[int, Stand] = {}
        self._read: dict[int, int] = {}
        self._histories = Histories()
        self._halted: dict[int, float] = {}
        self._asked_for: frozenset[int] = frozenset()
        self._ask_again = 0.0
        self._waits: dict[int, tuple[float, Sight]] = {}  # ranks whose stacks waited, since when that is known
        self._said: set[tuple[Any, ...]] = set()
        self._channel = channel
        self._lock = threading.Lock()
        self._reads = threading.RLock()  # a reading takes in words as it goes, and two threads have questions
        self._elsewhere: dict[int, tuple[float, list[Sight]]] = {}
        self._heard_at, self._shown_at = -PATIENCE, -SHOWN
        if channel is not None:
            channel.listen("sights", self._hear)

    @property
    def is_alarmed(self) -> bool:
        """Whether a rank is stopped, so that one should look again soon."""
        return bool(self._halted)

    def close(self) -> None:
        """Let go of the ledgers."""
        for _, reading in self._readings.values():
            reading.close()
        self._readings.clear()

    def forget(self) -> None:
        """This process was stopped itself: what it knows of how long others have stood still is worth nothing."""
        self._halted.clear()
        self._waits.clear()
        self._asked_for, self._ask_again = frozenset(), 0.0

    def look(self, inside: Mapping[int, Stand], still: Mapping[int, float], now: float) -> Stray | None:
        """One look; says why the run has to be ended, if it has.

        Args:
            inside: where the ranks stand that are in a call.
            still: for how many seconds each has not worked.
            now: the moment, on the clock of ``time.monotonic``.
        """
        self.open(inside)
        self._halted = {rank: since for rank, since in self._halted.items() if rank in inside}
        limit = next((stand.hang_timeout for stand in inside.values() if stand.hang_timeout is not None), math.inf)
        kill = next((stand.hang_kill for stand in inside.values() if stand.hang_kill is not None), math.inf)
        if limit == kill == math.inf:
            return None
        with self._reads:
            differing = self._compare_histories()
        if differing is not None:
            return self._told(differing)
        sights = {rank: self._sight(stand, still.get(rank, 0.0), now) for rank, stand in inside.items()}
        late = [sight for sight in sights.values() if sight.stopped >= HALTED]
        if late or self._is_due(sights, min(limit, kill), now):
            for rank, sight in sights.items():
                sights[rank] = self._asked(sight, now)
        everybody = [*sights.values(), *self._others(sights.values(), limit, now)]
        found = compare(everybody)
        if found is not None and late:
            return compare([_woken(sight) for sight in everybody]) or found
        return found or self._overdue(everybody, limit, kill, now)

    def divergence(self) -> Stray | None:
        """What all ledgers prove, those of ranks too that have come to their end; once, since it takes a while."""
        histories = Histories()
        with self._reads:
            for rank, (_, reading) in sorted(self._readings.items()):
                found = histories.take(rank, reading.notes(1), len(self._readings))
                if found is not None:
                    return self._told(found)
            clash = self._clash()
            return None if clash is None else self._told(clash)

    def _clash(self) -> dict[int, Note] | None:
        """Of what some rank has not come out of: the notes on a collective to which ranks brought other sizes."""
        made: dict[tuple[str, tuple[int, ...], int], dict[int, Note]] = {}
        for rank, (_, reading) in sorted(self._readings.items()):
            for note in reading.newest(16):
                if note.whole and note.number:
                    made.setdefault((note.group, note.members, note.number), {})[rank] = note
        for _, notes in sorted(made.items(), key=lambda item: item[0][2]):
            first = next(iter(notes.values()))
            if any(first.clashes(note) for note in notes.values()) and any(note.inside for note in notes.values()):
                return notes
        return None

    # -- one rank

    def open(self, stands: Mapping[int, Stand]) -> None:
        """Open the ledgers of ranks, while their processes live: what is open outlives them."""
        with self._reads:
            for rank, stand in stands.items():
                self._stands[rank] = stand
                if stand.ledger and self._readings.get(rank, ("",))[0] != stand.ledger:
                    with contextlib.suppress(OSError, ValueError):
                        self._readings[rank] = stand.ledger, Reading(stand.ledger)
                        self._read[rank] = 0

    def _compare_histories(self) -> dict[int, Note] | None:
        for rank, (_, reading) in self._readings.items():
            count = reading.count
            if count == self._read[rank]:
                continue
            first = max(self._read[rank] + 1, count - MOST + 1)
            self._read[rank] = count
            found = self._histories.take(rank, reading.notes(first), len(self._readings))
            if found is not None and self._is_so(found):
                return found
        return None

    def _is_so(self, notes: Mapping[int, Note]) -> bool:
        """Whether a second reading gives the same."""
        for rank, note in notes.items():
            again = next((n for n in self._readings[rank][1].notes(note.index) if n.index == note.index), note)
            if (again.operation, again.payload, again.number) != (note.operation, note.payload, note.number):
                return False
        return True

    def _told(self, notes: Mapping[int, Note]) -> Stray:
        sights = [self._asked(self._sight(self._stands[rank], 0.0, 0.0), 0.0) for rank in notes]
        trace = diverged([replace(sight, notes=(notes[sight.rank],)) for sight in sights])
        calls = [(rank, note.place or self._stands[rank].place, note) for rank, note in notes.items()]
        return trace if trace is not None else parted(calls)

    def _sight(self, stand: Stand, still: float, now: float) -> Sight:
        state = _state(stand.process)
        halted = 0.0
        if state == STOPPED:
            halted = now - self._halted.setdefault(stand.rank, now)
        else:
            self._halted.pop(stand.rank, None)
        reading = self._readings.get(stand.rank)
        with self._reads:
            notes = tuple(reading[1].newest(16)) if reading is not None else ()
        sight = Sight(stand.rank, now, stand, state, still, halted, notes)
        if sight.inside is None and still == 0.0:
            self._waits.pop(stand.rank, None)
        return sight

    def _asked(self, sight: Sight, now: float) -> Sight:
        """With its stack."""
        if sight.state not in (RUNS, SLEEPS):
            return sight
        stack = ask(sight.stand.process, sight.stand.answers)
        sight = self._spoken(sight)
        worker = None
        if stack is not None and stack.loads:
            workers = ask_workers(sight.stand.process, sight.stand.answers)
            worker = next((each for each in workers if each.fetches), None)
        sight = replace(sight, stack=stack, worker=worker)
        if sight.waited:
            self._waits.setdefault(sight.rank, (now, sight))
        else:
            self._waits.pop(sight.rank, None)
        return sight

    def _spoken(self, sight: Sight) -> Sight:
        """With the hook and the batch at which it is, if it can say so at once."""
        if sight.inside is not None or sight.rank not in self._readings:
            return sight
        begun = time.monotonic()
        speak(sight.stand.answers)
        time.sleep(ANSWER)
        said = self._readings[sight.rank][1].said(begun)
        return sight if said is None else replace(sight, phase=said[0], batch=said[1])

    # -- those that wait long

    def _is_due(self, sights: Mapping[int, Sight], limit: float, now: float) -> bool:
        """Whether it is time to ask the ranks for their stacks."""
        long = frozenset(rank for rank, sight in sights.items() if sight.waited >= limit or sight.still >= limit)
        due = bool(long) and (bool(long - self._asked_for) or now >= self._ask_again)
        self._asked_for = long
        if due:
            self._ask_again = now + max(limit, 10.0)
        return due

    def _overdue(self, sights: list[Sight], limit: float, kill: float, now: float) -> Stray | None:
        if self._channel is not None and all(sight.rank in self._stands for sight in sights):
            limit += 1.0  # others have not answered yet
        found = overdue(sights, limit)
        halted = any(sight.state == STOPPED for sight in sights)  # which is told in a moment
        if found is not None and found.trace and not halted:
            key = tuple((sight.rank, sight.place) for sight in sights if sight.waited >= limit)
            if key not in self._said:
                self._said.add(key)
                _say(found, kill)
        # of one whose stack alone says that it waits, it counts since that was first seen
        patient = any(sight.inside is not None and sight.waited >= kill for sight in sights)
        if not patient and not any(now - since >= kill for since, _ in self._waits.values()):
            return None
        asked = [self._asked(sight, now) if sight.rank in self._stands else sight for sight in sights]
        final = overdue(asked, min(limit, kill))
        return None if final is None else replace(final, text=f"{final}; hang_kill={kill:g} s are over")

    # -- other nodes

    def _others(self, own: Iterable[Sight], limit: float, now: float) -> list[Sight]:
        """The ranks of other nodes, as they were seen there."""
        if self._channel is None:
            return []
        own = list(own)
        # in time, so that others are known when it is told who waits for whom
        wanted = any(max(sight.waited, sight.still, sight.stopped) >= limit / 2 for sight in own)
        with self._lock:
            heard = now - self._heard_at < PATIENCE
            asks = heard and now - self._shown_at > SHOWN  # ranks are not asked for their stacks each second
            elsewhere = [sight for at, sights in self._elsewhere.values() if now - at < PATIENCE for sight in sights]
        if asks:
            self._shown_at = now
            own = [sight if sight.stack is not None else self._asked(sight, now) for sight in own]
        if wanted or heard:
            self._channel.send("sights", {"wanted": wanted, "sights": [sight.plain() for sight in own]})
        return elsewhere

    def _hear(self, node: int, body: Any) -> None:
        with self._lock:
            now = time.monotonic()
            before = {sight.rank: sight for sight in self._elsewhere.get(node, (0.0, []))[1]}
            sights = [Sight.of(plain) for plain in body["sights"]]
            for index, sight in enumerate(sights):
                if sight.stack is None and sight.rank in before:
                    known = before[sight.rank]
                    sights[index] = replace(sight, stack=known.stack, worker=known.worker)
            self._elsewhere[node] = now, sights
            if body["wanted"]:
                self._heard_at = now


def _state(process: int) -> str:
    try:
        return STATES.get(stat_of(process)[0], SLEEPS)
    except OSError:
        return GONE


def _woken(sight: Sight) -> Sight:
    """With the stack of a rank that is stopped: it answers before it goes on, and then it is to be ended anyway."""
    if sight.state != STOPPED:
        return sight
    return replace(sight, stack=ask_stopped(sight.stand.process, sight.stand.answers))


def _say(found: Stray, kill: float) -> None:
    """The warning: the run goes on."""
    then = "the run goes on" + ("" if kill == math.inf else f", and ends after hang_kill={kill:g} s of waiting")
    with contextlib.suppress(OSError, ValueError):
        print(f"{found.trace}\nlockstep: {one_line(str(found), None)}; {then}", file=sys.stderr, flush=True)
