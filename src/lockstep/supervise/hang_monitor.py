"""Watches the ranks of a node for hangs: what their traces and stacks show from one second to the next."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from lockstep.launch.processes import stat_of
from lockstep.supervise.causes import RULE, Divergence, Stand, alike, named
from lockstep.supervise.comparison import NOTES, Made
from lockstep.supervise.elsewhere import OtherNodes, OtherRanks
from lockstep.supervise.hang import (
    HALTED,
    Position,
    behind_of,
    circle,
    compare,
    diverged,
    mismatched,
    outrun,
    overdue,
    parted,
    position,
    stopped,
)
from lockstep.supervise.screen_text import one_line, wipe_line
from lockstep.supervise.snapshot import GONE, RUNS, SLEEPS, STOPPED, TRACED, RankSnapshot, told
from lockstep.supervise.stack_proof import StackProof, is_idle
from lockstep.supervise.stack_request import ask, ask_stopped, ask_workers, speak
from lockstep.supervise.trace_memory import Note, Reading

PERIOD = 1.0
"""Seconds from one look to the next. A look costs this process some 50 us for each rank, and the ranks nothing."""
MOST = 256
"""Notes of a rank that are compared in one look; where more are made in a second, the older ones are not."""
RECENT = 16
"""Newest notes of a rank that tell what it does."""
KNOWN = 8192
"""Collectives that some ranks have made and others not yet, of which the first rank's note is kept."""
ANSWER = 0.03
"""Seconds in which a rank that can says at which batch it is."""
PART = 0.04
"""The part of a processor that may go into comparing what ranks do, and again into telling who waits."""
STATES = {"T": STOPPED, "t": TRACED, "Z": GONE, "X": GONE, "R": RUNS, "D": RUNS}


class Histories:
    """What ranks did as each collective of each group, compared as it comes in."""

    def __init__(self) -> None:
        self._open: dict[Position, dict[int, Note]] = {}

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
            key = position(note)
            made = self._open.setdefault(key, {})
            if any(note.differs(other) for other in made.values()):
                return {**made, rank: note}
            made[rank] = note
            if len(made) >= min(ranks, len(note.members)):
                del self._open[key]
        while len(self._open) > KNOWN:
            del self._open[next(iter(self._open))]
        return None


class HangMonitor:
    """Looks at the ranks of a node, and hears of those of others.

    Args:
        hub: to the other nodes; None: there are none, or no way to them.
        size: ranks of all nodes; 0: nobody knows.
        wake: has the next look come at once.
    """

    def __init__(self, hub: OtherNodes | None = None, size: int = 0, wake: Callable[[], None] = lambda: None) -> None:
        self._readings: dict[int, tuple[str, Reading]] = {}
        self._stands: dict[int, Stand] = {}
        self._read: dict[int, int] = {}
        self._histories = Histories()
        self._halted: dict[int, float] = {}
        self._asked_for: frozenset[tuple[int, bool]] = frozenset()
        self._ask_again = self._prove_at = self._tell_at = 0.0
        self._waits: dict[int, float] = {}  # ranks whose stacks waited, since when that is known
        self._said: list[tuple[set[str], set[int]]] = []  # of each wait told: where ranks waited, and who was late
        self._reads = threading.RLock()  # a reading takes in words as it goes, and two threads have questions
        self.others = None if hub is None else OtherRanks(hub, size, wake)
        self._own_proof = StackProof(size)  # of this node alone

    @property
    def is_proving(self) -> bool:
        """Whether a proof is under way, so that one should look again at once."""
        return self._own_proof.is_pending or (self.others is not None and self.others.is_proving)

    @property
    def has_halted(self) -> bool:
        """Whether a rank was stopped when it was last seen, so that one should look again soon."""
        return bool(self._halted)

    def is_halted(self, rank: int) -> bool:
        """Whether a rank was stopped when it was last seen."""
        return rank in self._halted

    def close(self) -> None:
        """Let go of the traces."""
        with self._reads:
            for _, reading in self._readings.values():
                reading.close()
            self._readings.clear()

    def waits_since(self, rank: int) -> float | None:
        """When a rank entered the collective in which it is now; None where it is in none, or nobody knows."""
        with self._reads:
            reading = self._readings.get(rank)
            newest = [] if reading is None else reading[1].newest(1)
        return newest[0].entered if newest and newest[0].inside and not newest[0].aside else None

    def forget(self) -> None:
        """This process was stopped itself: what it knows of how long others have stood still is worth nothing."""
        self._halted.clear()
        self._waits.clear()
        self._asked_for, self._ask_again = frozenset(), 0.0

    def look(
        self,
        inside: Mapping[int, Stand],
        still: Mapping[int, float],
        now: float,
        outside: Sequence[Stand] = (),
        caught: str = "",
        ending: bool = False,
    ) -> Divergence | None:
        """One look; says why the run has to be ended, if it has.

        Args:
            inside: where the ranks stand that are in a call.
            still: for how many seconds each has not worked.
            now: the moment, on the clock of ``time.monotonic``.
            outside: where the ranks stand that have come out of one.
            caught: what ended a call on this node, and a script has caught.
            ending: whether a rank has failed or Ctrl-C was pressed: waits are no news then, and only this node's
                ranks are looked at.
        """
        self.open(inside)
        limit, kill = _limits(inside.values())
        looks = min(limit, kill) < math.inf and not ending
        with self._reads:
            differing = self._compare_histories() if looks else None
        if differing is not None:
            return self._told(differing)
        own, late = self._snapshots(inside, still, limit, kill, now)
        left = [RankSnapshot(stand.rank, now, stand) for stand in outside]
        everybody, found = self._strayed(own, left, limit, now, None if ending else self.others, caught)
        if found is not None or not looks:
            return found
        return self._judged([each for each in everybody if each.stand.inside], late, limit, kill, now)

    def _strayed(
        self,
        own: Sequence[RankSnapshot],
        left: Sequence[RankSnapshot],
        limit: float,
        now: float,
        others: OtherRanks | None,
        caught: str,
    ) -> tuple[Sequence[RankSnapshot], Divergence | None]:
        """The ranks of all nodes that are asked, and what their stacks prove.

        Args:
            own: this node's ranks in a call.
            left: those that have come out of one.
            limit: seconds after which a wait is told to the user.
            now: the moment.
            others: to be asked, too.
            caught: as of `look`.
        """
        if others is None:
            everybody: Sequence[RankSnapshot] = [*own, *left]
            return everybody, self._own_proof.seek(everybody, now, {0}, lambda: self._idle(own, now))
        if own:
            others.looked_at = now
        everybody = others.exchange([*own, *left], limit, now, self._asked, caught)
        return everybody, others.strayed(everybody, now, self._asked, caught)

    def _idle(self, own: Sequence[RankSnapshot], now: float) -> dict[int, RankSnapshot]:
        """This node's ranks that do nothing, with their stacks."""
        return {each.rank: self._asked(each, now, True) for each in own if is_idle(each)}

    def _snapshots(
        self, inside: Mapping[int, Stand], still: Mapping[int, float], limit: float, kill: float, now: float
    ) -> tuple[list[RankSnapshot], list[RankSnapshot]]:
        """This node's ranks in a call, with their stacks where it is time for that; and those that are stopped."""
        self._halted = {rank: since for rank, since in self._halted.items() if rank in inside}
        snapshots = {rank: self._snapshot(stand, still.get(rank, 0.0), now) for rank, stand in inside.items()}
        if limit < math.inf:
            snapshots = {each.rank: each for each in outrun(list(snapshots.values()), limit)}
        late = [snapshot for snapshot in snapshots.values() if snapshot.stopped >= HALTED]
        if late or self._is_due(snapshots, min(limit, kill), now):
            for rank, snapshot in snapshots.items():
                snapshots[rank] = self._asked(snapshot, now)
        return list(snapshots.values()), late

    def _judged(
        self, everybody: list[RankSnapshot], late: list[RankSnapshot], limit: float, kill: float, now: float
    ) -> Divergence | None:
        found = self._proof(everybody, now)
        if found is None:
            found = stopped(everybody) if self.others is None else self._halts(everybody, late, now)
        if found is not None and late:
            return compare([_woken(each) if self._is_own(each) else each for each in everybody]) or found
        if found is None and self.others is not None and self.others.is_watched:
            return None  # who waits for whom is seen there, and told once
        return found or self._overdue(everybody, limit, kill, now)

    def _halts(self, everybody: list[RankSnapshot], late: list[RankSnapshot], now: float) -> Divergence | None:
        """A rank that is stopped, on one of several nodes."""
        assert self.others is not None
        waits = self.others.waits() if late else ""
        if waits:
            return Divergence(f"{told([_woken(snapshot) for snapshot in late])} (SIGSTOP), and {waits}")
        if any(each.stopped >= HALTED and not self._is_own(each) for each in everybody):  # do others wait for it?
            everybody = [
                self._asked(each, now) if self._is_own(each) and each.stack is None else each for each in everybody
            ]
        return self.others.halted_elsewhere(everybody, [each.rank for each in late], now)

    def _is_own(self, snapshot: RankSnapshot) -> bool:
        return snapshot.rank in self._stands

    def _proof(self, everybody: list[RankSnapshot], now: float) -> Divergence | None:
        """What the ranks' notes prove; of thousands of ranks not each time, so that it takes no more than `PART`."""
        if now < self._prove_at:
            return None
        began = time.thread_time()
        found = diverged(everybody) or circle(everybody)
        self._prove_at = now + (time.thread_time() - began) / PART
        return found

    def divergence(self) -> Divergence | None:
        """What all traces prove, those of ranks too that have come to their end; once, since it takes a while."""
        histories = Histories()
        with self._reads:
            for rank, (_, reading) in sorted(self._readings.items()):
                found = histories.take(rank, reading.notes(1), len(self._readings))
                if found is not None:
                    return self._told(found)
            return self._clash() or self._unreached()

    def _clash(self) -> Divergence | None:
        """Of what some rank has not come out of: a collective to which ranks brought other sizes."""
        return mismatched(
            (rank, note.location or self._stands[rank].location, note)
            for rank, (_, reading) in sorted(self._readings.items())
            for note in reading.newest(RECENT)
        )

    def _unreached(self) -> Divergence | None:
        """Of what devices have in their queues and are not done with: which rank has not come to it. Where a device's
        backend loses patience it aborts the ranks that wait."""
        snapshots = [
            RankSnapshot(rank, 0.0, self._stands[rank], notes=tuple(reading.newest(RECENT)))
            for rank, (_, reading) in sorted(self._readings.items())
        ]
        waiting = [snapshot for snapshot in snapshots if snapshot.queued is not None]
        behind = behind_of(snapshots, waiting)
        waiting = [snapshot for snapshot in waiting if snapshot.rank not in behind]
        if not behind or not waiting:
            return None
        found = [self._asked(self._snapshot(self._stands[rank], 0.0, 0.0), 0.0) for rank in sorted(behind)]
        if any(snapshot.state == GONE for snapshot in found):
            return None  # that is why it did not come
        return Divergence(f"{told(found)}, and others waited in vain: {_queues(waiting)}. {RULE}")

    def newest(self, rank: int) -> list[Note]:
        """The newest notes of a rank that can be compared, whether it is there or not."""
        with self._reads:
            notes = self._readings[rank][1].newest(NOTES) if rank in self._readings else []
        return [note for note in notes if note.whole and note.number]

    def made(self, positions: Collection[Position]) -> list[Made]:
        """What this node's ranks did as these collectives, those together that did the same."""
        found: dict[tuple[object, ...], Made] = {}
        with self._reads:
            for rank, (_, reading) in sorted(self._readings.items()):
                for note in reading.newest(2 * NOTES):
                    if position(note) in positions:
                        where = note.location or self._stands[rank].location
                        same = (position(note), note.operation, note.payload, note.root, note.inside, where)
                        found.setdefault(same, ([], where, note))[0].append(rank)
        return list(found.values())

    # -- one rank

    def open(self, stands: Mapping[int, Stand]) -> None:
        """Open the traces of ranks, while their processes live: what is open outlives them."""
        with self._reads:
            for rank, stand in stands.items():
                self._stands[rank] = stand
                if stand.collectives and self._readings.get(rank, ("",))[0] != stand.collectives:
                    with contextlib.suppress(OSError, ValueError):
                        self._readings[rank] = stand.collectives, Reading(stand.collectives)
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

    def _told(self, notes: Mapping[int, Note]) -> Divergence:
        snapshots = [self._asked(self._snapshot(self._stands[rank], 0.0, 0.0), 0.0) for rank in notes]
        trace = diverged([replace(snapshot, notes=(notes[snapshot.rank],)) for snapshot in snapshots])
        calls = [(rank, note.location or self._stands[rank].location, note) for rank, note in notes.items()]
        return trace if trace is not None else parted(calls)

    def _snapshot(self, stand: Stand, still: float, now: float) -> RankSnapshot:
        state = _state(stand.process)
        halted = 0.0
        if state == STOPPED:
            halted = now - self._halted.setdefault(stand.rank, now)
        else:
            self._halted.pop(stand.rank, None)
        reading = self._readings.get(stand.rank)
        with self._reads:
            notes = tuple(reading[1].newest(RECENT)) if reading is not None else ()
            if reading is not None and any(note.queued for note in notes) and not reading[1].is_watched:
                notes = tuple(replace(note, queued=False) for note in notes)
        snapshot = RankSnapshot(stand.rank, now, stand, state, still, halted, notes)
        if snapshot.awaited is None and still == 0.0:
            self._waits.pop(stand.rank, None)
        return self._holding(snapshot)

    def _holding(self, snapshot: RankSnapshot) -> RankSnapshot:
        since = self._waits.get(snapshot.rank)
        return snapshot if since is None else replace(snapshot, held=max(0.0, snapshot.at - since))

    def _asked(self, snapshot: RankSnapshot, now: float, for_proof: bool = False) -> RankSnapshot:
        """With its stack; for a proof only where none of its threads could go on."""
        if snapshot.state not in (RUNS, SLEEPS) or (for_proof and _runs(snapshot.stand.process)):
            return snapshot
        stack = ask(snapshot.stand.process, snapshot.stand.answers)
        snapshot = self._spoken(snapshot)
        worker = None
        if stack is not None and stack.loads:
            workers = ask_workers(snapshot.stand.process, snapshot.stand.answers)
            worker = next((each for each in workers if each.fetches), None)
        snapshot = replace(snapshot, stack=stack, worker=worker)
        if snapshot.waited:
            self._waits.setdefault(snapshot.rank, now)
        else:
            self._waits.pop(snapshot.rank, None)
        return self._holding(replace(snapshot, held=0.0))

    def _spoken(self, snapshot: RankSnapshot) -> RankSnapshot:
        """With the hook and the batch at which it is, if it can say so at once."""
        if snapshot.inside is not None or snapshot.rank not in self._readings:
            return snapshot
        begun = time.monotonic()
        speak(snapshot.stand.answers)
        time.sleep(ANSWER)
        said = self._readings[snapshot.rank][1].said(begun)
        return snapshot if said is None else replace(snapshot, phase=said[0], batch=said[1])

    # -- those that wait long

    def _is_due(self, snapshots: Mapping[int, RankSnapshot], limit: float, now: float) -> bool:
        """Whether it is time to ask the ranks for their stacks."""
        long = frozenset(  # a rank whose device waits is known to do so a while after it stands still
            (rank, snapshot.waited >= limit)
            for rank, snapshot in snapshots.items()
            if snapshot.waited >= limit or snapshot.still >= limit
        )
        due = bool(long) and (bool(long - self._asked_for) or now >= self._ask_again)
        self._asked_for = long
        if due:
            self._ask_again = now + max(limit, 10.0)
        return due

    def _overdue(self, snapshots: list[RankSnapshot], limit: float, kill: float, now: float) -> Divergence | None:
        if now < self._tell_at:
            return None
        began = time.thread_time()
        if limit < math.inf:
            snapshots = outrun(snapshots, limit)
        found = self._waiting(snapshots, limit, kill, now)
        self._tell_at = now + (time.thread_time() - began) / PART
        return found

    def _tell_overdue(self, snapshots: list[RankSnapshot], limit: float, kill: float) -> None:
        """Tell once who waits where, as soon as there are stacks."""
        halted = any(snapshot.state == STOPPED for snapshot in snapshots)  # which is told in a moment
        has_stacks = any(snapshot.stack is not None or snapshot.worker is not None for snapshot in snapshots)
        if has_stacks and not halted and self._is_new(snapshots, limit):
            late = overdue(snapshots, limit)
            assert late is not None
            _say(late, kill)

    def _waiting(self, snapshots: list[RankSnapshot], limit: float, kill: float, now: float) -> Divergence | None:
        """Tells of those that wait long; why the run has to be ended, if it has."""
        # what is known of another node may be so much older, or not have come yet
        behind = 0.0 if self.others is None else PERIOD
        longest = max((snapshot.waited for snapshot in snapshots), default=0.0)  # all else is for those that wait long
        if longest >= limit + behind:
            self._tell_overdue(snapshots, limit, kill)
        # of one whose stack alone says that it waits, it counts since that was first seen
        patient = longest >= kill and any(s.awaited is not None and s.waited >= kill for s in snapshots)
        if not patient and not any(snapshot.held >= kill for snapshot in snapshots):
            return None
        asked = [self._asked(snapshot, now) if self._is_own(snapshot) else snapshot for snapshot in snapshots]
        final = overdue(asked, min(limit, kill))
        return None if final is None else replace(final, text=f"{final}; hang_kill={kill:g} s are over")

    def _is_new(self, snapshots: list[RankSnapshot], limit: float) -> bool:
        """Whether this wait has not been told: ranks wait in another place, or for a rank that had not been late.

        Ranks that join those that wait, or whose message came later, are not news; that nobody is late any more, is,
        once all have been heard of.
        """
        long = [snapshot for snapshot in snapshots if snapshot.waited >= limit]
        waiting = {snapshot.location for snapshot in long}
        late = {snapshot.rank for snapshot in snapshots if snapshot.waited < limit}
        for places, ranks in self._said:
            if waiting <= places and late <= ranks and (late or not ranks or _lacks_some(snapshots, long)):
                return False
        self._said.append((waiting, late))
        return True


def _limits(stands: Collection[Stand]) -> tuple[float, float]:
    """Seconds after which a wait is told, and after which it ends the run, as the first rank has it that has one."""
    timeouts = [stand.hang_timeout for stand in stands if stand.hang_timeout is not None]
    kills = [stand.hang_kill for stand in stands if stand.hang_kill is not None]
    return next(iter(timeouts), math.inf), next(iter(kills), math.inf)


def _queues(waiting: Iterable[RankSnapshot]) -> str:
    """What ranks wait for on their devices, those that wait for the same together."""
    words = {snapshot.rank: snapshot.queued.named for snapshot in waiting if snapshot.queued is not None}
    return "; ".join(f"{named(ranks)} in {what}" for what, ranks in alike(words.items()))


def _state(process: int) -> str:
    try:
        return STATES.get(stat_of(process)[0], SLEEPS)
    except OSError:
        return GONE


def _runs(process: int) -> bool:
    """Whether a thread of a process could go on, if only the processor or a disk had time for it."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
        for thread in threads:
            if stat_of(f"{process}/task/{thread}")[0] != "S" and thread != threading.get_native_id():
                return True
    except OSError:
        return True
    return False


def _lacks_some(snapshots: list[RankSnapshot], waiting: list[RankSnapshot]) -> bool:
    """Whether nothing is known of a rank that is in a collective with one that waits: its node has not said anything
    for a while."""
    groups = {id(note.members): note.members for note in (snapshot.awaited for snapshot in waiting) if note is not None}
    known = {snapshot.rank for snapshot in snapshots}
    return any(not known.issuperset(members) for members in groups.values())


def _woken(snapshot: RankSnapshot) -> RankSnapshot:
    """With the stack of a rank that is stopped: it answers before it goes on, and then it is to be ended anyway."""
    if snapshot.state != STOPPED:
        return snapshot
    return replace(snapshot, stack=ask_stopped(snapshot.stand.process, snapshot.stand.answers))


def _say(found: Divergence, kill: float) -> None:
    """The warning: the run goes on."""
    then = "the run goes on" + ("" if kill == math.inf else f", and ends after hang_kill={kill:g} s of waiting")
    with contextlib.suppress(OSError, ValueError):
        wipe_line()
        print(f"{found.trace}\nlockstep: {one_line(str(found), None)}; {then}", file=sys.stderr, flush=True)
