"""What stacks tell of ranks that do nothing: a question to all nodes, and what two answers that are alike prove."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence

from lockstep.supervise.causes import Divergence, has_left, strayed
from lockstep.supervise.snapshot import SLEEPS, RankSnapshot
from lockstep.supervise.stack import Stack

QUIET = 2.0
"""Seconds without any work of the processor after which a rank is asked where it is."""

QUIET_AT_FIRST = 3.0
"""The same while ranks connect to one another, which a signal disturbs, and where nobody looks for hangs."""

AGAIN = 0.3
"""Seconds from the answers to one question to the next question."""

SOON = 1.0
"""Seconds to the next question at the least where a rank that does nothing could not answer."""

UNANSWERED = 5.0
"""Seconds for which a question waits for nodes that do not answer."""

LONGEST = 60.0
"""Seconds from one proof that failed to the next at the most."""


def is_idle(snapshot: RankSnapshot) -> bool:
    """Whether a rank in a call has done nothing for so long that it may wait for another."""
    stand = snapshot.stand
    connects = stand.hang_timeout is None and stand.hang_kill is None
    quiet = QUIET_AT_FIRST if connects else QUIET
    return stand.inside and snapshot.state == SLEEPS and snapshot.still >= quiet


class StackQuestion:
    """A question for the stacks of all ranks in a call, and what nodes have answered. One is open at a time.

    Attributes:
        number: of the newest question.
        put_at: when it was put.
        wakes: whether it is for the ranks that are stopped, which go on when they have answered. What all others
            answered before is kept.
        is_open: whether nothing has been concluded from its answers yet.
    """

    def __init__(self) -> None:
        self.number = 0
        self.put_at = -math.inf
        self.wakes = self.is_open = False
        self._kept: Mapping[int, RankSnapshot] = {}
        self._answers: dict[int, Mapping[int, RankSnapshot]] = {}
        self._lock = threading.Lock()  # answers of other nodes come in another thread

    def put(self, now: float, kept: Mapping[int, RankSnapshot] | None = None) -> None:
        """Begin a new question.

        Args:
            now: the moment.
            kept: what was answered before, if only ranks that are stopped are asked now.
        """
        with self._lock:
            self.number, self.put_at, self.is_open = self.number + 1, now, True
            self.wakes, self._kept, self._answers = kept is not None, kept or {}, {}

    def take(self, node: int, number: int, answers: Mapping[int, RankSnapshot]) -> None:
        """The ranks of a node, as it has answered a question; an older one does not count any more."""
        with self._lock:
            if number == self.number:
                self._answers[node] = answers

    def is_answered(self, nodes: Collection[int]) -> bool:
        """Whether these nodes have all answered."""
        with self._lock:
            return self.is_open and self._answers.keys() >= set(nodes)

    def answers(self, nodes: Collection[int], now: float) -> dict[int, RankSnapshot] | None:
        """By rank, what these nodes have answered, once; None as long as the question waits for one of them."""
        if not self.is_open or not (self.is_answered(nodes) or now - self.put_at >= UNANSWERED):
            return None
        with self._lock:
            self.is_open = False
            return {**self._kept, **{rank: each for told in self._answers.values() for rank, each in told.items()}}


class StackProof:
    """What the answers to two questions prove that were put one after the other.

    All answers to the first question are there before the second is put. Where both answers are the same, there was a
    moment at which all ranks stood where they say.

    Args:
        size: ranks of all nodes; 0: nobody knows.
    """

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._before: dict[int, tuple[int, Stack | None]] | None = None  # what the first answers said
        self._next_at = self._wait = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether the second question is to be put."""
        return self._before is not None

    def is_due(self, every: Sequence[RankSnapshot], now: float) -> bool:
        """Whether to put a question: all ranks may be waiting, or some for one that has left.

        Args:
            every: all ranks that are known, those included that have come out of their call, or to their end.
            now: the moment.
        """
        if self._is_suspect(every):
            return now >= self._next_at
        self._before, self._wait = None, 0.0
        return False

    def _is_suspect(self, every: Sequence[RankSnapshot]) -> bool:
        idle = [each.stand.call for each in every if is_idle(each)]
        if not idle:
            return False
        first = min(idle)
        return len(idle) == len(every) >= self._size > 0 or any(has_left(each.stand, first) for each in every)

    def conclude(
        self, every: Sequence[RankSnapshot], answers: Mapping[int, RankSnapshot], now: float
    ) -> Divergence | None:
        """What these answers prove, and those before; after the first ones the next question is due soon."""
        if not self._is_suspect(every):
            self._before = None
            return None
        seen = {rank: (each.stand.call, each.stack) for rank, each in answers.items() if is_idle(each)}
        stacks = {rank: stack for rank, (_, stack) in seen.items() if stack is not None}
        stands = {each.rank: each.stand for each in every}
        found = strayed(stands, stacks, len(stands) >= self._size > 0)
        if found is None:
            is_whole = all(each.rank in stacks for each in every if is_idle(each))  # else one was busy for a moment
            self._wait = min(LONGEST, 2 * self._wait + 1) if is_whole else max(self._wait, SOON)
            self._before, self._next_at = None, now + self._wait
        elif self._before != seen:
            self._before, self._next_at = seen, now + AGAIN
            return None
        return found
