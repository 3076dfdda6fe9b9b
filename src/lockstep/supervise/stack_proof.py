"""Proof of a hang: two consecutive requests to all nodes for the stacks of idle ranks return equal stacks."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence

from lockstep.supervise.causes import Divergence, endless_wait, has_left
from lockstep.supervise.snapshot import SLEEPS, RankSnapshot
from lockstep.supervise.stack import Stack

QUIET = 2.0
"""Seconds without processor time after which a rank's stack is requested."""

QUIET_AT_FIRST = 3.0
"""`QUIET` for ranks that are connecting, where a signal would disturb, and for ranks without hang detection."""

AGAIN = 0.3
"""Seconds from the answers to one question until the next question."""

MIN_PAUSE = 1.0
"""Minimum seconds until the next question, if an idle rank could not answer."""

UNANSWERED = 5.0
"""Seconds for which a request waits for nodes that do not reply."""

MAX_PAUSE = 60.0
"""Maximum seconds between failed proofs."""


def is_idle(snapshot: RankSnapshot) -> bool:
    """Return True if a rank inside a Trainer call has been idle for so long that it may wait for another rank."""
    position = snapshot.position
    connects = position.hang_timeout is None and position.hang_kill is None
    quiet = QUIET_AT_FIRST if connects else QUIET
    return position.inside and snapshot.state == SLEEPS and snapshot.still >= quiet


class StackQuestion:
    """A request to all nodes for the stacks of their ranks, with the replies. At most one request is open.

    Attributes:
        number: number of the newest request.
        put_at: when the request was sent.
        wakes: whether the request is for the stopped ranks, which continue after their replies. Earlier replies of
            all other ranks are kept.
        is_open: whether the replies have not been evaluated yet.
    """

    def __init__(self) -> None:
        self.number = 0
        self.put_at = -math.inf
        self.wakes = self.is_open = False
        self._kept: Mapping[int, RankSnapshot] = {}
        self._answers: dict[int, Mapping[int, RankSnapshot]] = {}
        self._lock = threading.Lock()  # answers of other nodes arrive in another thread

    def put(self, now: float, kept: Mapping[int, RankSnapshot] | None = None) -> None:
        """Open a new request. If the earlier replies ``kept`` are given, the request is for stopped ranks only.

        Args:
            now: current time.
            kept: earlier replies, if the request is for stopped ranks only.
        """
        with self._lock:
            self.number, self.put_at, self.is_open = self.number + 1, now, True
            self.wakes, self._kept, self._answers = kept is not None, kept or {}, {}

    def take(self, node: int, number: int, answers: Mapping[int, RankSnapshot]) -> None:
        """Store a node's reply. Replies to older requests are ignored."""
        with self._lock:
            if number == self.number:
                self._answers[node] = answers

    def is_answered(self, nodes: Collection[int]) -> bool:
        """Return True if all of the given nodes have replied to the open request."""
        with self._lock:
            return self.is_open and self._answers.keys() >= set(nodes)

    def answers(self, nodes: Collection[int], now: float) -> dict[int, RankSnapshot] | None:
        """Close the request and return the replies, by rank. Return None while a node has not replied yet.

        A node that does not reply in time is no longer awaited.
        """
        if not self.is_open or not (self.is_answered(nodes) or now - self.put_at >= UNANSWERED):
            return None
        with self._lock:
            self.is_open = False
            return {**self._kept, **{rank: each for given in self._answers.values() for rank, each in given.items()}}


class StackProof:
    """Detector of endless waits, which compares the replies to two consecutive requests for stacks.

    The second request is sent after all replies to the first have arrived. If both replies are equal, there was a
    moment at which all ranks were at the reported lines.

    Args:
        size: number of ranks of all nodes; 0: unknown.
    """

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._before: dict[int, tuple[int, Stack | None]] | None = None  # the first answers
        self._next_at = self._wait = 0.0

    @property
    def is_pending(self) -> bool:
        """True if a first request has found a possible hang, which a second request has to confirm."""
        return self._before is not None

    def is_due(self, every: Sequence[RankSnapshot], now: float) -> bool:
        """Return True if the next request should be sent now, because ranks may be waiting forever.

        Args:
            every: all known ranks, including ranks that have left their call or ended.
            now: current time.
        """
        if self._is_suspect(every):
            return now >= self._next_at
        self._before, self._wait = None, 0.0
        return False

    def _is_suspect(self, every: Sequence[RankSnapshot]) -> bool:
        idle = [each.position.call for each in every if is_idle(each)]
        if not idle:
            return False
        first = min(idle)
        return len(idle) == len(every) >= self._size > 0 or any(has_left(each.position, first) for each in every)

    def conclude(
        self, every: Sequence[RankSnapshot], answers: Mapping[int, RankSnapshot], now: float
    ) -> Divergence | None:
        """Return the hang that ``answers`` and the previous replies prove, or None.

        The method also schedules the next request.
        """
        if not self._is_suspect(every):
            self._before = None
            return None
        seen = {rank: (each.position.call, each.stack) for rank, each in answers.items() if is_idle(each)}
        stacks = {rank: stack for rank, (_, stack) in seen.items() if stack is not None}
        positions = {each.rank: each.position for each in every}
        found = endless_wait(positions, stacks, len(positions) >= self._size > 0)
        if found is None:
            # a rank that has not answered was busy
            is_whole = all(each.rank in stacks for each in every if is_idle(each))
            self._wait = min(MAX_PAUSE, 2 * self._wait + 1) if is_whole else max(self._wait, MIN_PAUSE)
            self._before, self._next_at = None, now + self._wait
        elif self._before != seen:
            self._before, self._next_at = seen, now + AGAIN
            return None
        return found
