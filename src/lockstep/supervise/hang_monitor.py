"""Watches the ranks of a node for hangs: what their traces and stacks show from one second to the next."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lockstep.launch.processes import stat_of
from lockstep.supervise.causes import RULE, Divergence, Stand
from lockstep.supervise.elsewhere import OtherNodes, OtherRanks
from lockstep.supervise.hang import HALTED, behind_of, diverged, location_of, overdue, parted, stopped
from lockstep.supervise.screen_text import name_cells, one_line, wipe_line
from lockstep.supervise.snapshot import GONE, RUNS, SLEEPS, STOPPED, TRACED, RankSnapshot, told, traced
from lockstep.supervise.stack_proof import StackProof, StackQuestion
from lockstep.supervise.stack_request import ask, ask_stopped, ask_workers
from lockstep.supervise.trace_memory import Note
from lockstep.supervise.traces import Traces

PERIOD = 1.0
"""Seconds from one look to the next. A look costs this process some 50 us for each rank, and the ranks nothing."""
PART = 0.04
"""The part of a processor that may go into comparing what ranks of all nodes do, and again into who waits for long."""
T = TypeVar("T")
STATES = {"T": STOPPED, "t": TRACED, "Z": GONE, "X": GONE, "R": RUNS, "D": RUNS}


@dataclass(frozen=True)
class WaitLimits:
    """How long ranks may wait for others: until it is told, and until the run is ended. In seconds."""

    told: float = math.inf
    kill: float = math.inf

    @classmethod
    def of(cls, stands: Sequence[Stand]) -> WaitLimits:
        """As the first rank has it that has one."""
        timeouts = (stand.hang_timeout for stand in stands if stand.hang_timeout is not None)
        kills = (stand.hang_kill for stand in stands if stand.hang_kill is not None)
        return cls(next(timeouts, math.inf), next(kills, math.inf))

    @property
    def first(self) -> float:
        """The shorter one; infinite where nobody wants to know."""
        return min(self.told, self.kill)

    def are_over(self, snapshot: RankSnapshot) -> bool:
        """Whether a rank has waited for so long that the run is to be ended. Where its stack alone says that it waits,
        the time counts since that was first seen."""
        noted = snapshot.waited if snapshot.awaited is not None else 0.0
        return max(snapshot.held, noted) >= self.kill


class Ration:
    """Has something done no more often than that it takes `PART` of the time."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def done(self, what: Callable[[], T], now: float) -> T | None:
        """What it gives; None where it is too soon."""
        if now < self._next_at:
            return None
        began = time.thread_time()
        found = what()
        self._next_at = now + (time.thread_time() - began) / PART
        return found


class HangMonitor:
    """Looks at the ranks of a node; on node 0 it judges those of all nodes.

    Args:
        hub: to the other nodes; None: there are none, or no way to them.
        size: ranks of all nodes; 0: nobody knows.
        wake: has the next look come at once.

    Attributes:
        traces: of this node's ranks.
        others: the ranks of other nodes; None: there are none, or no way to them.
    """

    def __init__(self, hub: OtherNodes | None = None, size: int = 0, wake: Callable[[], None] = lambda: None) -> None:
        self.traces = Traces()
        self._question = StackQuestion()
        self._proof = StackProof(size)
        self.others = None if hub is None else OtherRanks(hub, self._question, size, wake)
        self._node, self._size = 0 if hub is None else hub.node, size
        self._compares, self._counts = Ration(), Ration()
        self._halted: dict[int, float] = {}  # ranks that are stopped, since when that is known
        self._waits: dict[int, float] = {}  # ranks whose stacks waited, since when that is known
        self._long: frozenset[tuple[int, bool]] = frozenset()  # ranks that stood still for long, and whether they wait
        self._ask_again = 0.0
        self._is_ending = False
        self._said: list[tuple[set[str], set[int]]] = []  # of each wait told: where ranks waited, and who was late

    @property
    def is_proving(self) -> bool:
        """Whether answers are awaited, so that one should look again at once."""
        asked = self.others is not None and self.others.is_asked and not self._is_ending
        return asked or self._question.is_open or self._proof.is_pending

    @property
    def has_halted(self) -> bool:
        """Whether a rank was stopped when it was last seen, so that one should look again soon."""
        return bool(self._halted)

    def is_halted(self, rank: int) -> bool:
        """Whether a rank was stopped when it was last seen."""
        return rank in self._halted

    def forget(self) -> None:
        """This process was stopped itself: what it knows of how long others have stood still is worth nothing."""
        self._halted.clear()
        self._waits.clear()
        self._long, self._ask_again = frozenset(), 0.0

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
        self.traces.open(inside)
        limits = WaitLimits() if ending else WaitLimits.of([*inside.values()])
        differing = self.traces.differing() if limits.first < math.inf else {}
        if differing:
            return self._parted(differing)
        self._halted = {rank: since for rank, since in self._halted.items() if rank in inside}
        own = [self._snapshot(stand, still.get(rank, 0.0), now) for rank, stand in inside.items()]
        everybody = [*own, *(RankSnapshot(stand.rank, now, stand) for stand in outside)]
        self._is_ending = ending
        if self.others is None or ending:
            return self._judged(everybody, own, {self._node}, limits, now)
        return self._judged_with(self.others, everybody, own, caught, now)

    # -- all ranks that this node judges

    def _judged_with(
        self,
        others: OtherRanks,
        known: Sequence[RankSnapshot],
        own: Sequence[RankSnapshot],
        caught: str,
        now: float,
    ) -> Divergence | None:
        """Why the run has to be ended, if it has, where there are ranks on other nodes.

        Args:
            others: those.
            known: this node's ranks.
            own: those of them that are in a call.
            caught: what ended a call on this node, and a script has caught.
            now: the moment.
        """
        limits = WaitLimits.of([each.stand for each in own])
        everybody = others.exchange(
            known, limits.told, now, lambda wakes: self._answers(own, now, wakes).values(), caught
        )
        if others.is_watched:
            return None
        inside = [each for each in everybody if each.stand.inside]
        limits = WaitLimits.of([each.stand for each in inside])
        found = None if limits.first == math.inf else self._compares.done(lambda: diverged(inside), now)
        found = found or self._judged(everybody, own, others.nodes, limits, now)
        words = [said for said in (caught, *others.caught.values()) if said]
        return Divergence(words[0]) if found is not None and words else found

    def _judged(
        self,
        everybody: Sequence[RankSnapshot],
        own: Sequence[RankSnapshot],
        nodes: set[int],
        limits: WaitLimits,
        now: float,
    ) -> Divergence | None:
        """Why the run has to be ended, if it has.

        Args:
            everybody: all ranks that are known, those included that are in no call.
            own: this node's ranks in a call.
            nodes: those that answer questions for stacks.
            limits: how long ranks may wait.
            now: the moment.
        """
        if not self._question.is_open and self._is_due(everybody, limits, now):
            self._put(own, now)
        answers = self._question.answers(nodes, now)
        if answers is not None and not self._question.wakes:
            found = self._proof.conclude(everybody, answers, now)
            if found is not None:
                return found
            if limits.first < math.inf and stopped([*answers.values()]) is not None:  # it can say at which line it is
                self._put(own, now, kept=answers)
                answers = self._question.answers(nodes, now)
        if answers is None or limits.first == math.inf:
            return None
        return stopped([*answers.values()]) or self._overdue([*answers.values()], limits)

    def _is_due(self, everybody: Sequence[RankSnapshot], limits: WaitLimits, now: float) -> bool:
        """Whether it is time to ask the ranks for their stacks."""
        if self._proof.is_due(everybody, now):
            return True
        if limits.first == math.inf:
            return False
        if any(each.stopped >= HALTED for each in everybody):
            return now - self._question.put_at >= HALTED
        return bool(self._counts.done(lambda: self._stands_long(everybody, limits, now), now))

    def _stands_long(self, snapshots: Sequence[RankSnapshot], limits: WaitLimits, now: float) -> bool:
        """Whether ranks have stood still or waited for so long that it is to be told who waits for whom."""
        limit = limits.first
        long = frozenset(  # a rank whose device waits is known to do so a while after it stands still
            (each.rank, each.waited >= limit) for each in snapshots if max(each.waited, each.still) >= limit
        )
        is_new, self._long = bool(long - self._long), long
        if not long or not (is_new or now >= self._ask_again or any(limits.are_over(each) for each in snapshots)):
            return False
        self._ask_again = now + max(limit, 10.0)
        return True

    def _put(self, own: Sequence[RankSnapshot], now: float, kept: Mapping[int, RankSnapshot] | None = None) -> None:
        """Ask all nodes for their ranks' stacks; with ``kept`` those that are stopped, after all others."""
        self._question.put(now, kept)
        if self.others is not None:
            self.others.put(now, is_new=True)
        self._question.take(self._node, self._question.number, self._answers(own, now, kept is not None))

    def _overdue(self, asked: Sequence[RankSnapshot], limits: WaitLimits) -> Divergence | None:
        """Tells of those that wait long; why the run has to be ended, if it has."""
        late = None if any(each.state == STOPPED for each in asked) else overdue(asked, limits.told)
        if late is not None and self._is_new(asked, limits.told):
            _say(late, limits.kill)
        if not any(limits.are_over(each) for each in asked):
            return None
        final = overdue(asked, limits.first)
        return None if final is None else replace(final, text=f"{final}; hang_kill={limits.kill:g} s are over")

    def _is_new(self, snapshots: Sequence[RankSnapshot], limit: float) -> bool:
        """Whether this wait has not been told: ranks wait in another place, or for a rank that had not been late.

        Ranks that join those that wait, or whose message came later, are not news; that nobody is late any more, is,
        once all have been heard of.
        """
        waiting = {snapshot.location for snapshot in snapshots if snapshot.waited >= limit}
        late = {snapshot.rank for snapshot in snapshots if snapshot.waited < limit}
        lacks_some = len(snapshots) < self._size
        for places, ranks in self._said:
            if waiting <= places and late <= ranks and (late or not ranks or lacks_some):
                return False
        self._said.append((waiting, late))
        return True

    # -- where the traces alone tell

    def _parted(self, differing: Mapping[int, Note]) -> Divergence:
        """What ranks of this node did as one collective, with their stacks."""
        stands = self.traces.stands
        ranks = [self._asked(self._snapshot(stands[rank], 0.0, 0.0), 0.0) for rank in differing]
        calls = [(each.rank, location_of(each, differing[each.rank]), differing[each.rank]) for each in ranks]
        return parted(calls, traced(ranks))

    def divergence(self) -> Divergence | None:
        """What all traces prove, those of ranks too that have come to their end; once, since it takes a while."""
        return self.traces.mismatch() or self._unreached()

    def _unreached(self) -> Divergence | None:
        """Of what devices have in their queues and are not done with: which rank has not come to it. Where a device's
        backend loses patience it aborts the ranks that wait."""
        stands = self.traces.stands
        snapshots = [RankSnapshot(rank, 0.0, stand, notes=self.traces.newest(rank)) for rank, stand in stands.items()]
        waiting = [snapshot for snapshot in snapshots if snapshot.queued is not None]
        behind = behind_of(snapshots, waiting)
        waiting = [snapshot for snapshot in waiting if snapshot.rank not in behind]
        if not behind or not waiting:
            return None
        found = [self._asked(self._snapshot(stands[rank], 0.0, 0.0), 0.0) for rank in sorted(behind)]
        if any(snapshot.state == GONE for snapshot in found):
            return None  # that is why it did not come
        return Divergence(f"{told(found)}, and others do not come out: {told(waiting)}. {RULE}")

    # -- ranks of this node

    def _snapshot(self, stand: Stand, still: float, now: float) -> RankSnapshot:
        state = _state(stand.process)
        halted = 0.0
        if state == STOPPED:
            halted = now - self._halted.setdefault(stand.rank, now)
        else:
            self._halted.pop(stand.rank, None)
        notes = self.traces.newest(stand.rank)
        if any(note.queued for note in notes) and not self.traces.is_watched(stand.rank):
            notes = tuple(replace(note, queued=False) for note in notes)
        snapshot = RankSnapshot(stand.rank, now, stand, state, still, halted, notes)
        if snapshot.awaited is None and still == 0.0:
            self._waits.pop(stand.rank, None)
        return self._holding(snapshot)

    def _holding(self, snapshot: RankSnapshot) -> RankSnapshot:
        since = self._waits.get(snapshot.rank)
        return snapshot if since is None else replace(snapshot, held=max(0.0, snapshot.at - since))

    def _answers(self, own: Iterable[RankSnapshot], now: float, wakes: bool) -> dict[int, RankSnapshot]:
        """This node's ranks with their stacks: those that are stopped, which go on then, or all others."""
        if wakes:
            # A stopped rank answers before it goes on, and then it is to be ended anyway.
            halted = [(each, each.stand) for each in own if each.stopped >= HALTED]
            return {each.rank: replace(each, stack=ask_stopped(at.process, at.answers)) for each, at in halted}
        return {each.rank: self._asked(each, now) for each in own}

    def _asked(self, snapshot: RankSnapshot, now: float) -> RankSnapshot:
        """With its stack; one of which a thread could go on does not sleep, whatever its main thread does."""
        if snapshot.state not in (RUNS, SLEEPS):
            return snapshot
        stand = snapshot.stand
        state = RUNS if _runs(stand.process) else snapshot.state
        stack, worker = ask(stand.process, stand.answers), None
        if stack is not None and stack.loads:
            worker = next((each for each in ask_workers(stand.process, stand.answers) if each.fetches), None)
        snapshot = replace(snapshot, state=state, stack=stack, worker=worker, held=0.0)
        if snapshot.waited:
            self._waits.setdefault(snapshot.rank, now)
        else:
            self._waits.pop(snapshot.rank, None)
        return self._holding(snapshot)


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


def _say(found: Divergence, kill: float) -> None:
    """The warning: the run goes on."""
    then = "the run goes on" + ("" if kill == math.inf else f", and ends after hang_kill={kill:g} s of waiting")
    with contextlib.suppress(OSError, ValueError):
        wipe_line()
        text = f"{found.trace}\nlockstep: {one_line(str(found), None)}; {then}"
        print(name_cells(text), file=sys.stderr, flush=True)
