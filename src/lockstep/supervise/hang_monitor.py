"""Monitor that detects hangs on a node. It compares the ranks' traces and stacks once a second."""

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
from lockstep.supervise.causes import Divergence
from lockstep.supervise.elsewhere import OtherNodes, OtherRanks
from lockstep.supervise.hang import HALTED, diverged, late_ranks, location_of, overdue, stopped
from lockstep.supervise.hang_text import continues, different_calls, ended_by_limit, missing_ranks, stacks_of
from lockstep.supervise.screen_text import name_cells, one_line, wipe_line
from lockstep.supervise.snapshot import GONE, RUNS, SLEEPS, STOPPED, TRACED, RankPosition, RankSnapshot
from lockstep.supervise.stack_proof import StackProof, StackQuestion
from lockstep.supervise.stack_request import ask, ask_stopped, ask_workers
from lockstep.supervise.traces import Traces

PERIOD = 1.0
"""Seconds between checks. A check costs this process about 50 us per rank, and the ranks nothing."""
PART = 0.04
"""Fraction of processor time that comparing the ranks of all nodes may take. Finding long waits may take it, too."""
T = TypeVar("T")
STATES = {"T": STOPPED, "t": TRACED, "Z": GONE, "X": GONE, "R": RUNS, "D": RUNS}


@dataclass(frozen=True)
class WaitLimits:
    """Limits on how long ranks may wait for other ranks: until a report, and until the run is ended, in seconds."""

    report: float = math.inf
    kill: float = math.inf

    @classmethod
    def of(cls, positions: Sequence[RankPosition]) -> WaitLimits:
        """Return the limits that the ranks have set. Each limit is taken from the first rank that has set it."""
        timeouts = (position.hang_timeout for position in positions if position.hang_timeout is not None)
        kills = (position.hang_kill for position in positions if position.hang_kill is not None)
        return cls(next(timeouts, math.inf), next(kills, math.inf))

    @property
    def first(self) -> float:
        """The shorter of the two limits in seconds; infinite if neither is set."""
        return min(self.report, self.kill)

    def are_over(self, snapshot: RankSnapshot) -> bool:
        """Return True if the run has to end because the rank has waited too long.

        If only the rank's stack shows the wait, time counts since the stack was first seen waiting.
        """
        noted = snapshot.waited if snapshot.awaited is not None else 0.0
        return max(snapshot.held, noted) >= self.kill


class Ration:
    """Rate limit for a repeated task, so that the task uses at most the fraction `PART` of processor time."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def run(self, what: Callable[[], T], now: float) -> T | None:
        """Run a task and return its result. Return None without running the task if its next run is not due yet."""
        if now < self._next_at:
            return None
        start = time.thread_time()
        found = what()
        self._next_at = now + (time.thread_time() - start) / PART
        return found


class HangMonitor:
    """Monitor that detects hangs among a node's ranks, and on node 0 among all ranks.

    Args:
        hub: connection to the other nodes; None without one.
        size: number of ranks of all nodes; 0: unknown.
        wake: requests the next check at once.

    Attributes:
        traces: traces of this node's ranks.
        others: ranks of other nodes; None without a hub.
    """

    def __init__(self, hub: OtherNodes | None = None, size: int = 0, wake: Callable[[], None] = lambda: None) -> None:
        self.traces = Traces()
        self._question = StackQuestion()
        self._proof = StackProof(size)
        self.others = None if hub is None else OtherRanks(hub, self._question, size, wake)
        self._node, self._size = 0 if hub is None else hub.node, size
        self._compare_ration, self._wait_ration = Ration(), Ration()
        # stopped ranks, and when that was first seen
        self._halted: dict[int, float] = {}
        # ranks whose stacks wait, and when that was first seen
        self._waits: dict[int, float] = {}
        # ranks idle or waiting for long, and whether they wait
        self._long: frozenset[tuple[int, bool]] = frozenset()
        self._ask_again = 0.0
        self._is_ending = False
        # for each reported wait: its places, and the late ranks
        self._reported: list[tuple[set[str], set[int]]] = []

    @property
    def is_proving(self) -> bool:
        """True while a request for stacks or the reply to it is pending. The next check should then follow soon."""
        must_answer = self.others is not None and self.others.has_question and not self._is_ending
        return must_answer or self._question.is_open or self._proof.is_pending

    @property
    def has_halted(self) -> bool:
        """True if the last check found a rank suspended by a signal. The next check should then follow soon."""
        return bool(self._halted)

    def is_halted(self, rank: int) -> bool:
        """Return True if the last check found the rank suspended by a signal."""
        return rank in self._halted

    def forget(self) -> None:
        """Reset all measured times. Call this after this process was suspended, when it could not observe the ranks."""
        self._halted.clear()
        self._waits.clear()
        self._long, self._ask_again = frozenset(), 0.0

    def check(
        self,
        inside: Mapping[int, RankPosition],
        still: Mapping[int, float],
        now: float,
        outside: Sequence[RankPosition] = (),
        caught: str = "",
        ending: bool = False,
    ) -> Divergence | None:
        """Check the ranks once. Return the reason to end the run, or None to continue.

        Args:
            inside: positions of the ranks that are in a call.
            still: seconds for which each rank has been idle.
            now: current time, on the clock of ``time.monotonic``.
            outside: positions of the ranks that have left a call.
            caught: a caught exception that ended a call on this node; "" if there is none.
            ending: whether a rank has failed or Ctrl-C was pressed. Waits are expected then, and only this node's ranks
                are checked.
        """
        self.traces.open(inside)
        limits = WaitLimits() if ending else WaitLimits.of([*inside.values()])
        differing = self.traces.differing() if limits.first < math.inf else {}
        if differing:
            positions = self.traces.positions
            ranks = [self._with_stack(self._snapshot(positions[rank], 0.0, 0.0), 0.0) for rank in differing]
            calls = [(each.rank, location_of(each, differing[each.rank]), differing[each.rank]) for each in ranks]
            return Divergence(different_calls(calls), stacks_of(ranks))
        self._halted = {rank: since for rank, since in self._halted.items() if rank in inside}
        own = [self._snapshot(position, still.get(rank, 0.0), now) for rank, position in inside.items()]
        everybody = [*own, *(RankSnapshot(position.rank, now, position) for position in outside)]
        self._is_ending = ending
        if self.others is None or ending:
            return self._judge(everybody, own, {self._node}, limits, now)
        others = self.others
        limits = WaitLimits.of([each.position for each in own])
        everybody = others.exchange(
            everybody, limits.report, now, lambda wakes: self._answers(own, now, wakes).values(), caught
        )
        if others.is_watched:  # node 0 judges for all
            return None
        in_call = [each for each in everybody if each.position.inside]
        limits = WaitLimits.of([each.position for each in in_call])
        found = None if limits.first == math.inf else self._compare_ration.run(lambda: diverged(in_call), now)
        found = found or self._judge(everybody, own, others.nodes, limits, now)
        # an exception that a script caught explains why others wait
        errors = [text for text in (caught, *others.caught.values()) if text]
        return Divergence(errors[0]) if found is not None and errors else found

    def _judge(
        self,
        everybody: Sequence[RankSnapshot],
        own: Sequence[RankSnapshot],
        nodes: set[int],
        limits: WaitLimits,
        now: float,
    ) -> Divergence | None:
        """Decide from the states of all known ranks if the run has to end. Return the reason, or None to continue.

        Args:
            everybody: all known ranks, inside or outside a call.
            own: this node's ranks in a call.
            nodes: nodes that answer questions for stacks.
            limits: how long ranks may wait.
            now: current time.
        """
        if not self._question.is_open and self._is_due(everybody, limits, now):
            self._put(own, now)
        answers = self._question.answers(nodes, now)
        if answers is not None and not self._question.wakes:
            found = self._proof.conclude(everybody, answers, now)
            if found is not None:
                return found
            if limits.first < math.inf and stopped([*answers.values()]) is not None:
                # a stopped rank can report the line where it stopped
                self._put(own, now, kept=answers)
                answers = self._question.answers(nodes, now)
        if answers is None or limits.first == math.inf:
            return None
        answered = [*answers.values()]
        found = stopped(answered)
        if found is not None:
            return found
        # one of the ranks may have been stopped for a moment only
        late = None if any(each.state == STOPPED for each in answered) else overdue(answered, limits.report)
        if late is not None and self._is_first_report(answered, limits.report):
            _print(late, limits.kill)
        if not any(limits.are_over(each) for each in answered):
            return None
        final = overdue(answered, limits.first)
        return None if final is None else replace(final, text=ended_by_limit(final, limits.kill))

    def _is_due(self, everybody: Sequence[RankSnapshot], limits: WaitLimits, now: float) -> bool:
        """Return True if it is time to request the ranks' stacks."""
        if self._proof.is_due(everybody, now):
            return True
        if limits.first == math.inf:
            return False
        if any(each.stopped >= HALTED for each in everybody):
            return now - self._question.put_at >= HALTED
        return bool(self._wait_ration.run(lambda: self._is_wait_due(everybody, limits, now), now))

    def _is_wait_due(self, snapshots: Sequence[RankSnapshot], limits: WaitLimits, now: float) -> bool:
        """Return True if a rank has been idle or waiting for so long that the ranks' stacks are needed for a report."""
        limit = limits.first
        # a wait on a device is recorded only a while after the rank became idle
        long = frozenset(
            (each.rank, each.waited >= limit) for each in snapshots if max(each.waited, each.still) >= limit
        )
        is_new, self._long = bool(long - self._long), long
        if not long or not (is_new or now >= self._ask_again or any(limits.are_over(each) for each in snapshots)):
            return False
        self._ask_again = now + max(limit, 10.0)
        return True

    def _put(self, own: Sequence[RankSnapshot], now: float, kept: Mapping[int, RankSnapshot] | None = None) -> None:
        """Request the ranks' stacks from all nodes; with earlier replies in ``kept``, only stopped ranks' stacks."""
        self._question.put(now, kept)
        if self.others is not None:
            self.others.request(now, is_new=True)
        self._question.take(self._node, self._question.number, self._answers(own, now, kept is not None))

    def _is_first_report(self, snapshots: Sequence[RankSnapshot], limit: float) -> bool:
        """Return True if the current wait has not been reported yet, and mark the wait as reported.

        A wait is new if its line or its late ranks are new.

        Ranks that join the waiting ranks, or whose report arrived later, do not count as new. A wait without late ranks
        counts as new once all ranks have reported.
        """
        waiting = {snapshot.location for snapshot in snapshots if snapshot.waited >= limit}
        late = {snapshot.rank for snapshot in snapshots if snapshot.waited < limit}
        lacks_some = len(snapshots) < self._size
        for places, ranks in self._reported:
            if waiting <= places and late <= ranks and (late or not ranks or lacks_some):
                return False
        self._reported.append((waiting, late))
        return True

    def divergence(self) -> Divergence | None:
        """Return the mismatch that the traces of all ranks (including ended ranks) prove, or None.

        The comparison is slow, so call the method only once.
        """
        found = self.traces.mismatch()
        if found is not None:
            return found
        # A device's backend aborts ranks that wait in its queue at its timeout. The ranks that did not reach that
        # collective are the cause.
        positions = self.traces.positions
        snapshots = [
            RankSnapshot(rank, 0.0, position, notes=self.traces.newest(rank)) for rank, position in positions.items()
        ]
        waiting = [snapshot for snapshot in snapshots if snapshot.queued is not None]
        late = late_ranks(snapshots, waiting)
        waiting = [snapshot for snapshot in waiting if snapshot.rank not in late]
        if not late or not waiting:
            return None
        missing = [self._with_stack(self._snapshot(positions[rank], 0.0, 0.0), 0.0) for rank in sorted(late)]
        if any(snapshot.state == GONE for snapshot in missing):
            return None  # its end explains why it did not arrive
        return Divergence(missing_ranks(missing, waiting))

    # -- ranks of this node

    def _snapshot(self, position: RankPosition, still: float, now: float) -> RankSnapshot:
        state = _state(position.process)
        halted = 0.0
        if state == STOPPED:
            halted = now - self._halted.setdefault(position.rank, now)
        else:
            self._halted.pop(position.rank, None)
        notes = self.traces.newest(position.rank)
        if any(note.queued for note in notes) and not self.traces.is_watched(position.rank):
            notes = tuple(replace(note, queued=False) for note in notes)
        snapshot = RankSnapshot(position.rank, now, position, state, still, halted, notes)
        if snapshot.awaited is None and still == 0.0:
            self._waits.pop(position.rank, None)
        return self._with_wait(snapshot)

    def _with_wait(self, snapshot: RankSnapshot) -> RankSnapshot:
        since = self._waits.get(snapshot.rank)
        return snapshot if since is None else replace(snapshot, held=max(0.0, snapshot.at - since))

    def _answers(self, own: Iterable[RankSnapshot], now: float, wakes: bool) -> dict[int, RankSnapshot]:
        """Return this node's ranks with their stacks. With ``wakes``, return only stopped ranks, and resume them."""
        if wakes:
            # A stopped rank answers before it continues. The run ends then in any case.
            halted = [(each, each.position) for each in own if each.stopped >= HALTED]
            return {each.rank: replace(each, stack=ask_stopped(at.process, at.answers)) for each, at in halted}
        return {each.rank: self._with_stack(each, now) for each in own}

    def _with_stack(self, snapshot: RankSnapshot, now: float) -> RankSnapshot:
        """Return a copy of the snapshot with the rank's stack and, while the rank loads data, a loader worker's stack.

        A rank's process with a runnable thread counts as running.
        """
        if snapshot.state not in (RUNS, SLEEPS):
            return snapshot
        position = snapshot.position
        state = RUNS if _runs(position.process) else snapshot.state
        stack, worker = ask(position.process, position.answers), None
        if stack is not None and stack.loads:
            worker = next((each for each in ask_workers(position.process, position.answers) if each.fetches), None)
        snapshot = replace(snapshot, state=state, stack=stack, worker=worker, held=0.0)
        if snapshot.waited:
            self._waits.setdefault(snapshot.rank, now)
        else:
            self._waits.pop(snapshot.rank, None)
        return self._with_wait(snapshot)


def _state(process: int) -> str:
    try:
        return STATES.get(stat_of(process)[0], SLEEPS)
    except OSError:
        return GONE


def _runs(process: int) -> bool:
    """Return True if a thread of a process is runnable or waits for a disk."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
        for thread in threads:
            if stat_of(f"{process}/task/{thread}")[0] != "S" and thread != threading.get_native_id():
                return True
    except OSError:
        return True
    return False


def _print(found: Divergence, kill: float) -> None:
    """Print a warning about a long wait, and the stacks of the ranks. The run continues."""
    with contextlib.suppress(OSError, ValueError):
        wipe_line()
        text = f"{found.trace}\nlockstep: {continues(one_line(str(found), None), kill)}"
        print(name_cells(text), file=sys.stderr, flush=True)
