"""Monitor for a node's ranks. It detects failed ranks, ranks that left a call, and waits that can never end."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.launch.processes import SAVE_TIMEOUT, stat_of
from lockstep.supervise import signals
from lockstep.supervise.causes import Cause, Divergence, has_continued, was_caught, with_host
from lockstep.supervise.elsewhere import OtherNodes
from lockstep.supervise.hang_monitor import PERIOD, HangMonitor
from lockstep.supervise.hang_text import after_ctrl_c, cannot_stop
from lockstep.supervise.mailbox import Mailbox
from lockstep.supervise.screen_text import name_cells, wipe_line
from lockstep.supervise.signals import SignalPipe
from lockstep.supervise.snapshot import RankPosition
from lockstep.supervise.stack_proof import QUIET
from lockstep.supervise.stack_request import ask, is_there

BUSY = 0.05
"""Fraction of a second of processor time per second above which a rank counts as working."""

LEAVE_TIMEOUT = 5.0
"""Seconds that a failed rank has to leave its call before its stack is requested."""

STALLED = 5.0
"""Seconds between two checks after which this process must have been stopped itself."""

OPENING = 30.0
"""Seconds after the first rank's first call in which traces of the others are searched for ten times a second."""

AT_ONCE = 3.0
"""Seconds that ranks have to end after a second Ctrl-C, or after the first one before they have joined."""

REPORT_TIMEOUT = 1.0
"""Seconds after a Ctrl-C in which rank 0's own handler should have reported it."""


@dataclass(frozen=True)
class Verdict:
    """The monitor's decision to end the ranks, with the first failure as the reason."""

    cause: Cause | Divergence | None  #: the first cause; None: it follows from the notes
    interrupted: bool = False


class RankMonitor:
    """Thread that checks a node's ranks once a second, and reports at most one verdict.

    Args:
        mailbox: mailbox of the ranks.
        on_verdict: called in the thread when the ranks have to be ended.
        ended: returns the ranks whose processes ended without failure, with the time.
        size: number of ranks of all nodes.
        hub: connection to the monitors of other nodes; None without one.
        host: name of this machine; "" if there is only one.
        on_check: called at each check, in the thread.

    Attributes:
        hangs: detects hangs among the ranks.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        on_verdict: Callable[[Verdict], None],
        ended: Callable[[], dict[int, float]],
        size: int,
        hub: OtherNodes | None = None,
        host: str = "",
        on_check: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self._on_check = on_check
        self.signal_pipe = SignalPipe()
        self.interrupted_at: float | None = None
        self._mailbox = mailbox
        self._size = size
        self._on_verdict = on_verdict
        self._ended = ended
        self._presses = 0
        self._second_at = 0.0
        self._printed_at = 0.0
        self._stopping = threading.Event()
        self._stillness: dict[int, _Stillness] = {}
        self._seconds: dict[int, float] = {}  # for which each rank has been idle
        self._looked_at = 0.0
        self.hangs = HangMonitor(hub, size, self.signal_pipe.wake)
        self._opens_until = math.inf
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def interrupt(self) -> None:
        """Pass a Ctrl-C that reached this process on to the ranks."""
        self._presses += 1
        self.signal_pipe.wake()

    def stop(self) -> None:
        """Stop the thread. Call it once, and not from ``on_verdict``."""
        self._stopping.set()
        self.signal_pipe.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.signal_pipe.close()
        self.hangs.traces.close()

    def positions(self) -> dict[int, RankPosition]:
        """Return the `RankPosition` of this node's ranks and of the ranks on ended nodes, by rank."""
        others = self.hangs.others
        return {**self.own_positions(), **({} if others is None else others.ended)}

    def farewell(self) -> dict[str, Any] | None:
        """Return the content of the message that this node sends before its supervisor ends."""
        others, own = self.hangs.others, self.own_positions()
        return None if others is None else others.farewell(own.values(), self._text_of(self._caught(own)))

    @property
    def caught_elsewhere(self) -> str:
        """Caught exception that ended a Trainer call on another node, which has ended since; "" if there is none."""
        return "" if self.hangs.others is None else self.hangs.others.caught_at_end

    def _caught(self, positions: Mapping[int, RankPosition]) -> Cause | None:
        """Return the first exception that ended a Trainer call on this node and that the script caught, or None."""
        return next((note for note in self._mailbox.read() if was_caught(note, positions)), None)

    def _text_of(self, caught: Cause | None) -> str:
        return "" if caught is None else with_host(caught, self.host)

    def own_positions(self) -> dict[int, RankPosition]:
        """Return the `RankPosition` of this node's ranks, including ended ranks, by rank."""
        positions = self._mailbox.positions()
        for rank, at in self._ended().items():
            there = positions.get(rank) or RankPosition(rank, at, 0, False, "")
            positions[rank] = replace(there, at=min(there.at, at) if not there.inside else at, inside=False, ended=True)
        return positions

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._await_period()
            self._on_check()
            self._presses += self.signal_pipe.presses()
            verdict = None if self._stopping.is_set() else self._check()
            if verdict is not None and not self._stopping.is_set():
                self._on_verdict(verdict)
                return

    def _await_period(self) -> None:
        """Sleep until the next check is due or a signal arrives.

        Traces are opened as soon as ranks announce them, because the trace of a rank that ends early would be lost.
        """
        seconds = PERIOD
        if self.hangs.is_proving:
            seconds = PERIOD / 10
        elif self.hangs.has_halted or any(PERIOD <= still < 2 * QUIET for still in self._seconds.values()):
            seconds = PERIOD / 4  # a rank is stopped, or has just become idle
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if time.monotonic() < self._opens_until:
                positions = self._mailbox.positions()
                self.hangs.traces.open(positions)
                if positions and self._opens_until == math.inf:
                    self._opens_until = time.monotonic() + OPENING
                left = min(left, PERIOD / 10)
            if select.select([self.signal_pipe], [], [], left)[0]:
                return

    def _check(self) -> Verdict | None:
        positions, now = self.own_positions(), time.monotonic()
        since, self._looked_at = now - (self._looked_at or now), now
        inside = {rank: position for rank, position in positions.items() if position.inside}
        if not inside:
            if positions:  # the call has ended, and the effect of Ctrl-C with it
                self._presses, self.interrupted_at, self._second_at, self._printed_at = 0, None, 0.0, 0.0
            return self._hung(inside, now)
        if since > max(3 * PERIOD, STALLED):
            # this process was stopped or starved, so its measured times are wrong
            self._stillness.clear()
            self.hangs.forget()
        self._seconds = {
            rank: self._stillness.setdefault(rank, _Stillness()).seconds(position.process, now)
            for rank, position in inside.items()
        }
        # only now: the signal wakes a rank that sleeps, which would then count as working
        verdict = self._pass_on(inside, now) if self._presses else None
        if verdict is not None:
            return verdict
        return self._failed(inside, now) or self._hung(inside, now) or self._stuck_after_ctrl_c(inside, now)

    def _hung(self, inside: dict[int, RankPosition], now: float) -> Verdict | None:
        """Return a verdict if ranks wait forever or for too long. Return None otherwise."""
        others, own = self.hangs.others, self.own_positions()
        if not inside and (others is None or not own):
            return None
        ending = bool(self._presses) or self._mailbox.is_someone_ending()
        outside = [position for position in own.values() if not position.inside]
        caught = self._caught(own) if outside else None
        # a script may also have caught the error and continued, while others are still in that call
        if caught is None:
            caught = next((note for note in self._mailbox.read() if has_continued(note, own)), None)
        found = self.hangs.check(inside, self._seconds, now, outside, self._text_of(caught), ending)
        if found is None:
            return None
        return Verdict(caught if caught is not None and others is None else found, self.interrupted_at is not None)

    def _pass_on(self, inside: dict[int, RankPosition], now: float) -> Verdict | None:
        if self.interrupted_at is None:
            self.interrupted_at = now
        for position in inside.values():
            if position.process != os.getpid() and is_there(position.answers):
                signals.pass_on(position.process)
        has_joined = self._mailbox.has_joined()
        if has_joined and 0 in inside and now - self.interrupted_at >= REPORT_TIMEOUT and not self._printed_at:
            self._printed_at = now
            # Python runs no handler of rank 0 while its main thread waits for a device or for other ranks
            position, reports = inside[0], self._mailbox.others("heard")
            if not any((note["heard"], note["call"]) == (position.rank, position.call) for note in reports):
                found = ask(position.process, position.answers)
                where = position.location if found is None else found.described(position.location)
                with contextlib.suppress(OSError, ValueError):  # stderr is closed
                    wipe_line()
                    print(name_cells(after_ctrl_c(where)), file=sys.stderr, flush=True)
        # nothing to save: the first press counts like a second
        if self._presses > 1 or not has_joined:
            self._second_at = self._second_at or now
            if now - self._second_at >= AT_ONCE:
                return Verdict(None, interrupted=True)
        return None

    def _failed(self, inside: dict[int, RankPosition], now: float) -> Verdict | None:
        """Return a verdict if a rank has reported an exception but does not leave its Trainer call; None otherwise."""
        for cause in self._mailbox.read():
            position = inside.get(cause.rank)
            if position is None or position.call != cause.call or now - cause.at < LEAVE_TIMEOUT or cause.is_interrupt:
                continue
            stack = ask(position.process, position.answers)
            if now - cause.at >= SAVE_TIMEOUT or stack is None or stack.waits:
                return Verdict(None if cause.lost else cause)
        return None

    def _stuck_after_ctrl_c(self, inside: Mapping[int, RankPosition], now: float) -> Verdict | None:
        """Return a verdict if all ranks still wait after Ctrl-C and cannot finish a window. Return None otherwise."""
        # ranks on other nodes, which are not seen here, may take longer
        seconds = QUIET if len(inside) >= self._size else SAVE_TIMEOUT
        if self.interrupted_at is None or now - self.interrupted_at < seconds or self.hangs.is_proving:
            return None
        if any(self._seconds[rank] < QUIET for rank in inside):
            return None
        answers = {rank: ask(position.process, position.answers) for rank, position in inside.items()}
        waiting = {rank: stack for rank, stack in answers.items() if stack is not None and stack.waits}
        if waiting.keys() != inside.keys():
            return None
        rank, stack = next(iter(waiting.items()))
        where = stack.described(inside[rank].location)
        return Verdict(Divergence(cannot_stop(sorted(waiting), where)), interrupted=True)


class _Stillness:
    """Timer that measures for how long a process has used no processor time."""

    def __init__(self) -> None:
        self._used, self._at, self._since = -1.0, 0.0, 0.0

    def seconds(self, process: int, now: float) -> float:
        """Return for how many seconds the process has been idle; 0 if unknown."""
        used, sleeps = _processor_time(process)
        first = self._at == 0.0  # nothing is known about the time before
        if first or not sleeps or used - self._used > BUSY * max(PERIOD, now - self._at):
            self._since = now
        self._used, self._at = used, now
        return now - self._since


def _processor_time(process: int) -> tuple[float, bool]:
    """Return (seconds of processor time that a process has used, True if all its threads sleep)."""
    try:
        fields = stat_of(process)
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used, fields[0] == "S"
    except OSError:
        return -1.0, False
