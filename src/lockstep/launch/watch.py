"""The watch over the ranks of a node: who waits for what cannot come, who fails and does not end, and Ctrl-C."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.launch import interrupt
from lockstep.launch.causes import Cause, Stand, Stray, named, strayed, was_caught
from lockstep.launch.children import FAREWELL as LONGEST
from lockstep.launch.children import stat_of
from lockstep.launch.interrupt import Ear
from lockstep.launch.lookout import Channel, Lookout
from lockstep.launch.notes import Notes
from lockstep.launch.sample import ask, is_there
from lockstep.launch.stack import Stack

PERIOD = 1.0
"""Seconds from one look to the next. A look costs this process some 50 us for each rank, and the ranks nothing."""

QUIET = 2.0
"""Seconds without any work of the processor after which a rank is asked where it is."""

QUIET_AT_FIRST = 3.0
"""The same while ranks connect to one another, which a signal disturbs, and where nobody looks for hangs."""

BUSY = 0.05
"""The part of a second of processor time from which on a rank counts as working."""

FAREWELL = 5.0
"""Seconds that a rank gets to end after its failure before it is asked where it is."""

LATE = 5.0
"""Seconds from one look to the next after which this process was asleep itself."""

OPENING = 30.0
"""Seconds after the first rank has come to a call in which the others' ledgers are looked for every tenth of one."""

AT_ONCE = 3.0
"""Seconds that the ranks get to end after a second Ctrl-C."""


@dataclass(frozen=True)
class Verdict:
    """Why the ranks have to be ended."""

    cause: Cause | Stray | None  #: the first cause; None: what is noted tells
    interrupted: bool = False


class Watch:
    """A thread that looks at the ranks of a node once a second, and gives its verdict at most once.

    Args:
        notes: of the ranks.
        everyone: whether the ranks of this node are all there are.
        on_verdict: called in the thread when the ranks have to be ended.
        ended: ranks whose processes came to their end and did not fail, with the time.
        channel: to the watches of other nodes; None: there are none, or no way to them.
    """

    def __init__(
        self,
        notes: Notes,
        everyone: bool,
        on_verdict: Callable[[Verdict], None],
        ended: Callable[[], dict[int, float]],
        channel: Channel | None = None,
    ) -> None:
        self.ear = Ear()
        self.interrupted_at: float | None = None
        self._notes = notes
        self._everyone = everyone
        self._on_verdict = on_verdict
        self._ended = ended
        self._presses = 0
        self._second_at = 0.0
        self._stopping = threading.Event()
        self._stillness: dict[int, _Stillness] = {}
        self._seconds: dict[int, float] = {}  # for which each rank has not worked
        self._looked_at = 0.0
        self._lookout = Lookout(channel)
        self._asked_at, self._wait = 0.0, 0.0
        self._opens_until = math.inf
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def interrupt(self) -> None:
        """Ctrl-C reached this process, which is no rank itself: pass it on."""
        self._presses += 1
        self.ear.wake()

    def stop(self) -> None:
        """Stop looking; called once, and not from ``on_verdict``."""
        self._stopping.set()
        self.ear.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.ear.close()
        self._lookout.close()

    def divergence(self) -> Stray | None:
        """What the ledgers prove, those of ranks included that have come to their end: that calls do not match."""
        return self._lookout.divergence()

    def stands(self) -> dict[int, Stand]:
        """Where the ranks stand, those included that have come to their end."""
        stands = self._notes.stands()
        for rank, at in self._ended().items():
            there = stands.get(rank) or Stand(rank, at, 0, False, "")
            stands[rank] = replace(there, at=min(there.at, at) if not there.inside else at, inside=False, ended=True)
        return stands

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._await_period()
            self._presses += self.ear.heard()
            verdict = None if self._stopping.is_set() else self._look()
            if verdict is not None and not self._stopping.is_set():
                self._on_verdict(verdict)
                return

    def _await_period(self) -> None:
        """Sleep until the next look, or a signal. Ledgers are opened as soon as ranks say where they lie: a rank that
        dies in its first second takes an unopened one with it."""
        until = time.monotonic() + (PERIOD / 4 if self._lookout.is_alarmed else PERIOD)
        while (left := until - time.monotonic()) > 0:
            if time.monotonic() < self._opens_until:
                stands = self._notes.stands()
                self._lookout.open(stands)
                if stands and self._opens_until == math.inf:
                    self._opens_until = time.monotonic() + OPENING
                left = min(left, PERIOD / 10)
            if select.select([self.ear], [], [], left)[0]:
                return

    def _look(self) -> Verdict | None:
        stands, now = self.stands(), time.monotonic()
        since, self._looked_at = now - (self._looked_at or now), now
        inside = {rank: stand for rank, stand in stands.items() if stand.inside}
        if not inside:
            if stands:  # a call is over, and its Ctrl-C with it
                self._presses, self.interrupted_at, self._second_at = 0, None, 0.0
            return None
        if self._presses:
            verdict = self._pass_on(inside, now)
            if verdict is not None:
                return verdict
        if since > max(
            3 * PERIOD, LATE
        ):  # this process was stopped, or starved: what it knows of time is worth nothing
            self._stillness.clear()
            self._lookout.forget()
        still = {rank for rank, stand in inside.items() if self._is_still(stand, now)}
        return self._failed(inside, now) or self._stray(stands, inside, still, now) or self._hung(inside, now)

    def _hung(self, inside: dict[int, Stand], now: float) -> Verdict | None:
        """Ranks that wait for what their ledgers say cannot come, or for too long."""
        if self._presses or any(cause.rank in inside for cause in self._notes.read() if cause.call):
            return None  # it is ending
        found = self._lookout.look(inside, self._seconds, now)
        return None if found is None else Verdict(found)

    def _pass_on(self, inside: dict[int, Stand], now: float) -> Verdict | None:
        if self.interrupted_at is None:
            self.interrupted_at, self._wait = now, 0.0
        for stand in inside.values():
            if stand.process != os.getpid() and is_there(stand.answers):
                interrupt.pass_on(stand.process)
        if self._presses > 1:
            self._second_at = self._second_at or now
            if now - self._second_at >= AT_ONCE:
                return Verdict(None, interrupted=True)
        return None

    def _failed(self, inside: dict[int, Stand], now: float) -> Verdict | None:
        """A rank that has failed, and has still not come out of its call."""
        for cause in self._notes.read():
            stand = inside.get(cause.rank)
            if stand is None or stand.call != cause.call or now - cause.at < FAREWELL or cause.is_interrupt:
                continue
            stack = ask(stand.process, stand.answers)
            if now - cause.at >= LONGEST or stack is None or stack.waits:
                return Verdict(None if cause.lost else cause)
        return None

    def _stray(self, stands: dict[int, Stand], inside: dict[int, Stand], still: set[int], now: float) -> Verdict | None:
        """Ranks that wait for what cannot come."""
        if not still:
            self._wait = 0.0
            return None
        someone_left = any(stand.ended or not stand.inside for stand in stands.values())
        if not someone_left and still != inside.keys() and len({stand.call for stand in inside.values()}) == 1:
            return None
        if now - self._asked_at < (self._wait if self.interrupted_at is None else PERIOD):
            return None
        if any(_runs(inside[rank].process) for rank in still):
            return None
        stacks = _alike(_ask(inside, still), inside, still)
        self._asked_at, self._wait = now, min(60.0, 2 * self._wait + 1)
        found = strayed(stands, stacks, self._everyone)
        if found is not None:
            own = [cause for cause in self._notes.read() if was_caught(cause, stands)]
            return Verdict(own[0] if own else found, self.interrupted_at is not None)
        waiting = {rank: stack for rank, stack in stacks.items() if stack.waits}
        patience = QUIET if self._everyone else LONGEST  # ranks elsewhere may have more to do
        asked_to_end = self.interrupted_at is not None and now - self.interrupted_at >= patience
        if asked_to_end and waiting.keys() == inside.keys():
            rank, stack = next(iter(waiting.items()))
            where = stack.described(inside[rank].place)
            return Verdict(Stray(f"{named(sorted(waiting))} waited in {where} and could not be stopped in order"), True)
        return None

    def _is_still(self, stand: Stand, now: float) -> bool:
        """Whether a rank has not worked for a while."""
        stillness = self._stillness.setdefault(stand.rank, _Stillness())
        seconds = self._seconds[stand.rank] = stillness.seconds(stand.process, now)
        connects = stand.hang_timeout is None and stand.hang_kill is None
        return seconds >= (QUIET_AT_FIRST if connects else QUIET)


def _ask(inside: dict[int, Stand], ranks: set[int]) -> dict[int, Stack]:
    answers = {rank: ask(inside[rank].process, inside[rank].answers) for rank in sorted(ranks)}
    return {rank: stack for rank, stack in answers.items() if stack is not None}


def _alike(stacks: dict[int, Stack], inside: dict[int, Stand], ranks: set[int]) -> dict[int, Stack]:
    """Those that answer the same a moment later."""
    if not any(stack.waits for stack in stacks.values()):
        return stacks
    time.sleep(0.2)
    again = _ask(inside, ranks)
    return {rank: stack for rank, stack in stacks.items() if again.get(rank) == stack}


class _Stillness:
    """For how long a process has not worked."""

    def __init__(self) -> None:
        self._used, self._at, self._since = -1.0, 0.0, 0.0

    def seconds(self, process: int, now: float) -> float:
        """Seconds; 0 where it cannot be told."""
        used, sleeps = _processor_time(process)
        if not sleeps or used - self._used > BUSY * max(PERIOD, now - self._at):
            self._since = now
        self._used, self._at = used, now
        return now - self._since


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


def _processor_time(process: int) -> tuple[float, bool]:
    """Seconds of processor time that a process has used, and whether all its threads sleep."""
    try:
        fields = stat_of(process)
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used, fields[0] == "S"
    except OSError:
        return -1.0, False
